"""Messages of a checkout that is not built, or is beside an old jax; and which installed module a checkout uses."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

from jax_splitk import _ffi
from jax_splitk.runtime import requirements

ROOT = pathlib.Path(__file__).parents[2]
VERSION = requirements.PACKAGE.joinpath("__init__.py").read_text().partition('__version__ = "')[2].partition('"')[0]
WHERE = "import jax_splitk, json; from jax_splitk import _ffi; print(json.dumps([jax_splitk.__file__, _ffi.__file__]))"


class Checkout:
    """A copy of the sources, and folders to install packages in; no .pth file leads elsewhere."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.site = folder / "checkout", folder / "site"
        for name in ("jax_splitk", "ffi"):
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "tables")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        (self.site / "jax_splitk").mkdir(parents=True)
        others = folder / "others"
        others.mkdir()
        for path in (entry for where in sys.path if where.endswith("-packages") for entry in os.scandir(where)):
            if not path.name.startswith(("jax_splitk", "_editable")) and not os.path.lexists(others / path.name):
                (others / path.name).symlink_to(path.path)
        self.path = [self.folder, self.site, others]

    def install(self, name: str | None = None, version: str = "") -> None:
        """Installs the compiled module, or a distribution that has only a name and a version."""
        if name is None:
            found = importlib.util.find_spec("jax_splitk._ffi")
            assert found is not None and found.origin is not None
            shutil.copy(found.origin, self.site / "jax_splitk")
        else:
            metadata = self.site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.path)), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-S", *words]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def refusal(self) -> str:
        """The last line of what `import jax_splitk` raises."""
        done = self.run("-c", "import jax_splitk")
        assert done.returncode == 1
        return done.stderr.strip().splitlines()[-1]

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {f"{name}>={version}" for name, version in requirements.OLDEST.items()} <= set(project["dependencies"])
    assert project["requires-python"] == ">=3.11"


def test_the_compiled_module_names_its_sources() -> None:
    assert (VERSION, requirements.sources_digest()) == (_ffi.VERSION, _ffi.SOURCES)
    assert not requirements.is_stale(_ffi)


def test_a_checkout_takes_the_installed_module(checkout: Checkout) -> None:
    """After `pip install .`, inside the checkout, whose folder `jax_splitk` comes first."""
    checkout.install()
    done = checkout.run("-c", WHERE)
    assert done.returncode == 0, done.stderr
    package, module = (pathlib.Path(file) for file in json.loads(done.stdout))
    assert package.parent == checkout.folder / "jax_splitk"
    assert module.parent == checkout.site / "jax_splitk"


def test_a_checkout_that_is_not_built_says_so(checkout: Checkout) -> None:
    assert checkout.refusal() == (
        f"ImportError: jax_splitk {VERSION} in {checkout.folder} is not built for this "
        f"Python ({sys.executable}): run `pip install -e .` in {checkout.folder}"
    )
    done = checkout.run("-m", "jax_splitk", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-2:] == [
        "verdict: jax_splitk cannot be imported: see the problem",
        "next: pip install -e .",
    ]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("ffi/launcher.cc", "namespace", "namespace "),
        ("jax_splitk/__init__.py", f'"{VERSION}"', '"99.1.2"'),
    ],
)
def test_an_installed_module_of_other_sources_is_not_taken(file: str, old: str, new: str, checkout: Checkout) -> None:
    checkout.install()
    checkout.replace(file, old, new)
    refusal = checkout.refusal()
    assert f"{checkout.site}/jax_splitk was built from other sources (version {VERSION})" in refusal
    assert refusal.endswith(
        f"run `pip install -e .` in {checkout.folder}, or leave this folder to use the installed one"
    )


def test_an_installed_package_without_its_module_says_so(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / "ffi")
    assert checkout.refusal().endswith("it cannot be imported from a zip archive")


def test_an_old_jax_is_named(checkout: Checkout) -> None:
    checkout.install()
    checkout.install("jax", "0.6.2")
    checkout.install("jaxlib", "0.6.2.dev1")
    why = (
        f"jax_splitk {VERSION} needs jax 0.10.2 or later (installed: 0.6.2) and jaxlib 0.10.2 or later (installed: "
        "0.6.2.dev1): pip install --upgrade 'jax>=0.10.2' 'jaxlib>=0.10.2'"
    )
    assert checkout.refusal() == f"ImportError: {why}"
    done = checkout.run("-m", "jax_splitk", "explain", "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"python -m jax_splitk: {why}\n")
    done = checkout.run("-m", "jax_splitk", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert {"jax 0.6.2", f"problem: {why}"} <= set(lines)
    assert lines[-1] == "next: pip install --upgrade 'jax>=0.10.2' 'jaxlib>=0.10.2'"
    checkout.install("jax-cuda13-plugin", "0.6.2")
    assert checkout.refusal().endswith("pip install --upgrade 'jax[cuda13]>=0.10.2' 'jaxlib>=0.10.2'")


def test_an_old_python_is_named(checkout: Checkout) -> None:
    old = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import jax_splitk"
    done = checkout.run("-c", old)
    assert done.stderr.splitlines()[-1] == "ImportError: jax_splitk needs Python 3.11 or later, this is 3.10.13"


@pytest.mark.parametrize("target", ["demo", "demo-quantized", "test", "package", "docs"])
def test_make_names_an_old_python(target: str, tmp_path: pathlib.Path) -> None:
    """It fails before it creates an environment."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 10, 13, 'final', 0)\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={tmp_path}/venv", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = "jax_splitk needs Python 3.11 or later, this is 3.10.13: make PYTHON=python3.11 ..."
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, said)
    assert not (tmp_path / "venv").exists()
