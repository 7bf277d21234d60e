"""Checks that importing the package needs: supported versions of jax and jaxlib, and the compiled module,
`jax_splitk._ffi`. Only the standard library is imported here."""

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import types

# As in pyproject.toml.
OLDEST = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.0"}
COMPILED = "jax_splitk._ffi"
PACKAGE = pathlib.Path(__file__).parents[1]


def check(version: str) -> None:
    """Makes `jax_splitk._ffi` importable.

    Args:
      version: this package's version.

    Raises:
      ImportError: something is missing or too old. The message has the package's name and the command that installs it.
    """
    # Building a checkout installs its requirements, too.
    if (why := unmet_module(version) or unmet_version(version)) is not None:
        raise ImportError(why, name="jax_splitk")


def unmet_version(version: str) -> str | None:
    """Which required packages are missing or too old, and the command that installs them; None if all are there."""
    found = {name: installed(name) for name in OLDEST}
    # A package without metadata (of another build system) cannot be judged.
    wrong = [
        name
        for name, has in found.items()
        if (importlib.util.find_spec(name) is None if has is None else numbers(has) < numbers(OLDEST[name]))
    ]
    if not wrong:
        return None
    needed = " and ".join(f"{name} {OLDEST[name]} or later (installed: {found[name] or 'none'})" for name in wrong)
    extra = {"jax": "jax[cuda13]"} if installed("jax-cuda13-plugin") else {}
    wanted = " ".join(f"'{extra.get(name, name)}>={OLDEST[name]}'" for name in wrong)
    return f"jax_splitk {version} needs {needed}: pip install --upgrade {wanted}"


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """(0, 10, 2) of "0.10.2.dev3"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def unmet_module(version: str) -> str | None:
    """Why the compiled module is missing, and the command that builds it; None if it is there.

    In a checkout the folder `jax_splitk` comes before an installed package, but has no compiled module after `pip
    install .`. Then the installed package's compiled module is used, if it was built from the checkout's own C++
    sources.
    """
    if importlib.util.find_spec(COMPILED) is not None:
        return None
    here = f"jax_splitk {version} in {PACKAGE.parent} is not built for this Python ({sys.executable})"
    if (digest := sources_digest()) is None:
        return (
            f"jax_splitk has a compiled part, {COMPILED}, which is not in {PACKAGE}. It is built when the package is "
            "installed (pip install), and must lie in a folder: it cannot be imported from a zip archive"
        )
    build = f"run `pip install -e .` in {PACKAGE.parent}"
    spec = _other_module()
    if spec is None or spec.origin is None or spec.loader is None:
        return f"{here}: {build}"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        return f"{here}, and {spec.origin} cannot be loaded ({error}): {build}"
    built = (getattr(module, "VERSION", "unknown"), getattr(module, "SOURCES", "unknown"))
    if built != (version, digest):
        elsewhere = f"the package installed in {pathlib.Path(spec.origin).parent} was built from other sources"
        return f"{here}, and {elsewhere} (version {built[0]}): {build}, or leave this folder to use the installed one"
    sys.modules[COMPILED] = module
    setattr(sys.modules["jax_splitk"], "_ffi", module)  # noqa: B010 - type checkers do not know the attribute
    return None


def sources_digest() -> str | None:
    """The digest of the C++ sources beside the package, as ffi/CMakeLists.txt has it; None if there are none."""
    folder = PACKAGE.parent / "ffi"
    if not (folder / "CMakeLists.txt").is_file():
        return None
    files = sorted(p for p in folder.iterdir() if p.suffix in (".cc", ".h") or p.name == "CMakeLists.txt")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def is_stale(module: types.ModuleType) -> bool:
    """Whether the compiled module was built from other C++ sources than those beside the package."""
    digest = sources_digest()
    return digest is not None and getattr(module, "SOURCES", None) != digest


def _other_module() -> importlib.machinery.ModuleSpec | None:
    """The compiled module of a jax_splitk elsewhere on the path."""
    folders = [os.path.join(entry or os.curdir, "jax_splitk") for entry in sys.path]
    others = [folder for folder in folders if os.path.isdir(folder) and not PACKAGE.samefile(folder)]
    found = importlib.machinery.PathFinder.find_spec("_ffi", others)
    if found is None or found.origin is None:
        return None
    return importlib.util.spec_from_file_location(COMPILED, found.origin)
