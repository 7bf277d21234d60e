"""Rules that the repository keeps to."""

import ast
import functools
import graphlib
import pathlib
import re
import types
from collections.abc import Callable, Iterator

import pytest

import jax_splitk
from jax_splitk.runtime import plan, stopwatch

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jax_splitk"
FOLDERS = ("jax_splitk", "ffi", "benchmarks", "examples", "tests")
SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh", ".txt"}
# From the top down: a module imports those of its own folder and of folders further down.
LAYERS = ("cli", "layers", "checkpoints", "ops", "tuning", "kernels", "problems", "quantized", "runtime")
LONGEST_FUNCTION = 50  # lines, of the package, without its docstring
# What a module of the package may hold that changes.
STATE = {
    "ops/intercept.py": ["_patch"],  # the functions of lax that it replaces, and for how many blocks
    "runtime/compiler.py": ["_memory", "_in_flight", "pool"],  # machine code that was compiled or read, each once
    "runtime/stopwatch.py": ["_state"],  # how often the next work is timed
    "runtime/worker.py": ["_started"],  # what starting a worker has shown
    "tuning/device.py": ["state"],  # the device on which this process measures
    "tuning/once.py": ["state"],  # what this process says or works out once
    "tuning/searches.py": ["state"],  # searches under way and to come
    "tuning/watch.py": ["state"],  # what the command line sees of a script
}
BEHIND_JAX = re.compile(r"jax(lib)?\._src(\.|$)")


@functools.cache
def sources(*folders: str) -> list[pathlib.Path]:
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    return sorted(p for p in files if "results" not in p.parts)


def python(*folders: str) -> list[pathlib.Path]:
    return [path for path in sources(*folders) if path.suffix == ".py"]


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def offenders(paths: list[pathlib.Path], breaks: Callable[[pathlib.Path], object]) -> dict[str, object]:
    """What is wrong, by file."""
    assert paths
    found = {str(path.relative_to(ROOT)): breaks(path) for path in paths}
    return {path: wrong for path, wrong in found.items() if wrong}


def test_checkout_is_whole() -> None:
    assert {folder for folder in FOLDERS if sources(folder)} == set(FOLDERS)
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(LAYERS)


# ---- imports -------------------------------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules that code imports anywhere in a file, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def named(tree: ast.Module) -> Iterator[str]:
    """Attributes and strings that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def reaches_behind_jax(tree: ast.Module) -> bool:
    return any(BEHIND_JAX.match(module) for module in (*imported(tree), *named(tree)))


def test_only_three_files_may_look_behind_jaxs_public_api() -> None:
    """One of the package, one that makes the benchmarks faster, and one for the tests."""
    three = [
        PACKAGE / "runtime" / "_compat.py",
        ROOT / "benchmarks" / "profile.py",
        ROOT / "tests" / "shared_contexts.py",
    ]
    files = [p for p in python("jax_splitk", "benchmarks", "examples", "tests") if "_src" in p.read_text()]
    wrong = offenders(files, lambda p: reaches_behind_jax(parsed(p)))
    assert set(wrong) <= {str(path.relative_to(ROOT)) for path in three}
    assert all("public API" in str(ast.get_docstring(parsed(path))) for path in three), "they say why"


@pytest.mark.parametrize(("text", "behind"), [
    ("import jax._src.core", True),
    ("from jax._src import core", True),
    ("from jax import _src", True),
    ("def f():\n  from jax._src.lax import convolution", True),
    ("import jax\nx = jax._src.core.Primitive", True),
    ("import importlib\nm = importlib.import_module('jax._src.core')", True),
    ("import jax\nfrom jax.extend import core  # not jax._src", False),
])  # fmt: skip
def test_imports_behind_the_api_would_be_seen(text: str, behind: bool) -> None:
    assert reaches_behind_jax(ast.parse(text)) == behind


@functools.cache
def imports() -> dict[str, set[str]]:
    """The package's modules, with those that each imports, in functions and for types alone, too. `jax_splitk` itself,
    which every import runs first, is left out."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python("jax_splitk")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found = {}
    for name, path in files.items():
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        pairs = [(getattr(node, "module", None) or "", alias.name) for node in nodes for alias in node.names]
        every = {f"{a}.{b}".strip(".") if f"{a}.{b}".strip(".") in files else a for a, b in pairs}
        found[name] = every & (set(files) - {"jax_splitk"})
    return found


def layer(module: str) -> int:
    """0 for the modules above all folders."""
    _, *folders = module.split(".")
    return 1 + LAYERS.index(folders[0]) if folders and folders[0] in LAYERS else 0


def test_imports_run_downwards() -> None:
    assert not [(a, b) for a, found in imports().items() for b in found if layer(b) < layer(a)]


def test_imports_are_no_circle() -> None:
    assert list(graphlib.TopologicalSorter(imports()).static_order())


KERNELS = PACKAGE / "kernels"
SHARED = ("base", "device")  # folders of kernels that all others may use; the others are ideas, one each


def idea(path: pathlib.Path) -> str:
    """The folder of kernels that a file is in; "" for the modules above them."""
    return "/".join(path.relative_to(KERNELS).parts[:-1])


def test_kernels_of_an_idea_use_no_other_idea() -> None:
    """They use device code of `device` and of their own folder, and modules of these folders and of `base`. `device`
    uses no other folder."""

    def others(path: pathlib.Path) -> set[str]:
        if path.suffix == ".py":
            found = {
                module.split(".")[2] for module in imported(parsed(path)) if module.startswith("jax_splitk.kernels.")
            }
            found &= {folder.name for folder in KERNELS.iterdir() if folder.is_dir()}
        else:
            found = set(re.findall(r'#include "(\w+)/', path.read_text()))
        own = idea(path)
        return found - {own, "device", *(SHARED if own != "device" else ())}

    assert not offenders([p for p in sources("jax_splitk/kernels") if idea(p)], others)


def test_splits_have_one_base() -> None:
    """Only its module makes the launches that add partial sums."""
    made = [
        p for p in python("jax_splitk") if re.search(r"\breduce_args\(", p.read_text().replace("def reduce_args", ""))
    ]
    assert [str(p.relative_to(KERNELS)) for p in made] == ["base/split.py"]


# ---- foreign function interface ------------------------------------------------------------------------------------


def test_ffi_names_begin_with_the_package_and_end_in_a_version() -> None:
    """What is registered is a target or a literal of the same form."""
    calls = [node for node in ast.walk(parsed(PACKAGE / "runtime" / "registration.py")) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).startswith("jax.ffi.register_ffi")]
    assert len(calls) == 8
    known = vars(plan) | {f"stopwatch.{name}": value for name, value in vars(stopwatch).items()}
    first = [call.args[0] for call in calls]
    names = [str(arg.value) if isinstance(arg, ast.Constant) else known[ast.unparse(arg)] for arg in first]
    assert set(names) >= set(plan.TARGETS)
    assert all(re.fullmatch(r"jax_splitk_\w+_v\d", name) for name in names)


def test_ffi_calls_name_no_other_target() -> None:
    calls = [node for path in python("jax_splitk") for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).endswith(("ffi_call", "ffi_lowering"))]
    # `ops/propagation.py` marks operations of a module that is never run; `runtime/stopwatch.py` has its own targets.
    assert sorted(ast.unparse(call.args[0]) for call in calls) == ["custom_call.target", "target", "target"]


def test_lax_is_called_as_it_was_imported() -> None:
    """The package calls lax's convolution by a name that it imported. Otherwise it would get the function that
    `intercept` puts into jax.lax. Layers of Flax nnx shall get it (`make_interceptable`)."""
    own = [path for path in python("jax_splitk") if path.name != "flax_nnx.py"]

    def calls(path: pathlib.Path) -> list[int]:
        nodes = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
        return [node.lineno for node in nodes if ast.unparse(node.func).endswith("lax.conv_general_dilated")]

    assert not offenders(own, calls)


# ---- what builds ---------------------------------------------------------------------------------------------------


def code_without_comments(path: pathlib.Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
        return ast.unparse(tree)
    return re.sub(r"//[^\n]*|/\*.*?\*/|#(?!\s*(include|if|define|el|end|pragma))[^\n]*", "", text, flags=re.DOTALL)


def test_code_that_runs_or_builds_uses_no_nvcc() -> None:
    nvcc = re.compile(r"nvcc|enable_language\(CUDA|find_package\(CUDA|LANGUAGES[^)]*CUDA|CUDA_HOME")
    assert not offenders(sources("jax_splitk", "ffi"), lambda path: nvcc.search(code_without_comments(path)))


def test_nvcc_would_be_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text('"""No nvcc."""\n# nvcc\nrun(["nvcc", "x.cu"])\n')
    assert code_without_comments(tmp_path / "a.py").count("nvcc") == 1
    (tmp_path / "CMakeLists.txt").write_text("# no nvcc\nproject(x LANGUAGES CXX CUDA)\n")
    assert "nvcc" not in code_without_comments(tmp_path / "CMakeLists.txt")
    assert "CUDA" in code_without_comments(tmp_path / "CMakeLists.txt")


def test_host_code_includes_no_cuda_header() -> None:
    header = re.compile(r'#include\s*[<"](cuda|cuda_runtime|driver_types|nvrtc)[\w]*\.h[>"]')
    assert not offenders(sources("ffi"), lambda path: header.search(path.read_text()))


# ---- device code ---------------------------------------------------------------------------------------------------

# The start of barriers, the reallocation of registers, and the order of WGMMA instructions.
SKELETON = re.compile(
    r"\bBarrier::init\b|\.init\(|\bfence_barrier_init\b|\b(raise|lower)_registers\b|\bcute::|::fma\(|\basm\b"
)


def test_only_the_skeleton_starts_barriers_and_orders_products() -> None:
    device = PACKAGE / "kernels" / "device"
    files = [path for path in sources("jax_splitk/kernels") if path.suffix in {".cu", ".cuh"}]
    assert not offenders([p for p in files if p.parent != device], lambda p: SKELETON.search(code_without_comments(p)))
    assert any(SKELETON.search(path.read_text()) for path in files if path.parent == device)


@pytest.mark.parametrize("text", [
    "Barrier::init(&full, 1);", "pipeline.init();", "fence_barrier_init();", "raise_registers<232>();",
    "cute::warpgroup_arrive();", "GMMA::MMA_64x64x16_F32BF16BF16_SS<>::fma(a, b);", 'asm volatile("setmaxnreg");',
])  # fmt: skip
def test_a_kernel_with_a_skeleton_of_its_own_would_be_seen(text: str) -> None:
    assert SKELETON.search(text)


# ---- parameters of primitives --------------------------------------------------------------------------------------


def looks_parameters_up(tree: ast.Module) -> list[int]:
    """Lines that take a parameter of an equation by its name as a string, rather than a field of its call."""
    subscripts = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript | ast.Call))
    found = []
    for node in subscripts:
        called = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
        )
        of = node.value if isinstance(node, ast.Subscript) else node.func.value if called else None  # pyright: ignore
        key = node.slice if isinstance(node, ast.Subscript) else next(iter(node.args), None)
        named = isinstance(key, ast.Constant) and isinstance(key.value, str)
        if of is not None and named and ast.unparse(of).endswith("params"):
            found.append(node.lineno)
    return found


def test_a_primitive_has_one_parameter_whose_fields_are_not_looked_up_by_strings() -> None:
    assert not offenders(python("jax_splitk"), lambda path: looks_parameters_up(parsed(path)))
    for text in ('params["options"]', 'eqn.params["padding"]', 'params.get("dtype")', 'params.pop("dtype")'):
        assert looks_parameters_up(ast.parse(text)) == [1]
    for text in ("params[i]", "params[name]", 'fields["params"]', "self.params"):
        assert not looks_parameters_up(ast.parse(text))


# ---- how it is written ---------------------------------------------------------------------------------------------


def test_modules_have_docstrings() -> None:
    assert not offenders(python("jax_splitk"), lambda path: not ast.get_docstring(parsed(path)))


def test_no_docstring_begins_with_of() -> None:
    """A genitive needs its noun in the same sentence."""
    files = python("jax_splitk", "benchmarks", "examples", "tests")
    assert not offenders(files, lambda path: re.search(r'^ *"""Of ', path.read_text(), re.MULTILINE))


def test_functions_are_short() -> None:
    def lines(node: ast.stmt) -> int:
        return (node.end_lineno or 0) - node.lineno + 1

    def long(path: pathlib.Path) -> list[str]:
        functions = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef))
        return [
            f.name for f in functions if lines(f) - bool(ast.get_docstring(f)) * lines(f.body[0]) > LONGEST_FUNCTION
        ]

    assert not offenders(python("jax_splitk"), long)


def state(tree: ast.Module) -> list[str]:
    """Names of a module that hold an empty container, or a new object other than a constant, and names that functions
    rebind."""
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = node.value
            empty = (isinstance(value, ast.Dict) and not value.keys) or (
                isinstance(value, ast.List | ast.Set) and not value.elts
            )
            new = isinstance(value, ast.Call) and not value.args and not value.keywords
            called = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            (name,) = map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])
            if empty or (
                new and (called in ("dict", "list", "set") or (called.lstrip("_")[0].isupper() and not name.isupper()))
            ):
                found.append(name)
    return found


def test_state_is_where_it_is_said() -> None:
    found = offenders(python("jax_splitk"), lambda path: state(parsed(path)))
    assert {path.removeprefix("jax_splitk/"): names for path, names in found.items()} == STATE
    for text in ("a = {}", "a: dict[str, int] = {}", "a = set()", "a = threading.Lock()", "def f():\n  global a"):
        assert state(ast.parse(text)) == ["a"]
    for text in (
        "a = {1: 2}",
        "a = (1,)",
        "a = f()",
        "def f():\n  a = {}",
        "FAMILY = Family(Config)",
        "XLA = Candidate()",
    ):
        assert not state(ast.parse(text))


def test_the_package_shows_its_public_names_only() -> None:
    names: dict[str, object] = {}
    exec("from jax_splitk import *", names)
    assert names.keys() - {"__builtins__"} == set(jax_splitk.__all__)
    assert {name for name in dir(jax_splitk) if not name.startswith("__")} == set(jax_splitk.__all__)
    assert not any(isinstance(value, types.ModuleType) for value in names.values())
