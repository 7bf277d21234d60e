"""Rules that the repository keeps to."""

import ast
import pathlib
import re
import types

import pytest

import jax_splitk
from jax_splitk.runtime import plan
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET, HOST_WGRAD_TARGET

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jax_splitk"
FOLDERS = ("jax_splitk", "ffi", "benchmarks", "examples", "tests")
SUFFIXES = {".py", ".cc", ".h", ".cu", ".txt"}


def sources(*folders: str) -> list[pathlib.Path]:
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    return sorted(p for p in files if "results" not in p.parts)


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(text: str) -> set[str]:
    """Modules that Python code imports, `from a import b` as both `a` and `a.b`, and what it names as attributes."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"jax\._src(\.|$)", node.value)
        ):
            found.add(node.value)
    return found


def reaches_behind_jax(text: str) -> bool:
    return any(re.match(r"jax(lib)?\._src(\.|$)", module) for module in imported_modules(text))


def test_checkout_is_whole() -> None:
    assert {folder for folder in FOLDERS if sources(folder)} == set(FOLDERS)


@pytest.mark.parametrize(
    "path", [p for p in sources("jax_splitk", "benchmarks", "examples", "tests") if p.suffix == ".py"], ids=name
)
def test_only_one_file_may_look_behind_jaxs_public_api(path: pathlib.Path) -> None:
    assert path == PACKAGE / "runtime" / "_compat.py" or not reaches_behind_jax(path.read_text())


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ("import jax._src.core", True),
        ("from jax._src import core", True),
        ("from jax import _src", True),
        ("def f():\n  from jax._src.lax import convolution", True),
        ("import jax\nx = jax._src.core.Primitive", True),
        ("import importlib\nm = importlib.import_module('jax._src.core')", True),
        ("import jax\nfrom jax.extend import core  # not jax._src", False),
    ],
)
def test_imports_behind_the_api_would_be_seen(text: str, behind: bool) -> None:
    assert reaches_behind_jax(text) == behind


def test_the_one_file_says_why() -> None:
    assert "public API" in ast.get_docstring(ast.parse((PACKAGE / "runtime" / "_compat.py").read_text()))


def test_ffi_names_begin_with_the_package_and_end_in_a_version() -> None:
    assert re.fullmatch(r"jax_splitk_\w+_v\d", plan.LAUNCH_TARGET)
    assert re.fullmatch(r"jax_splitk_\w+_v\d", HOST_WGRAD_TARGET)
    assert re.fullmatch(r"jax_splitk_\w+_v\d", HOST_QUANTIZED_TARGET)
    # What is registered is one of these or a literal of the same form.
    tree = ast.parse((PACKAGE / "runtime" / "registration.py").read_text())
    first_arguments = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("jax.ffi.register_ffi")
    ]
    assert len(first_arguments) == 4
    constants = {"LAUNCH_TARGET": plan.LAUNCH_TARGET, "HOST_WGRAD_TARGET": HOST_WGRAD_TARGET}
    constants["HOST_QUANTIZED_TARGET"] = HOST_QUANTIZED_TARGET
    for argument in first_arguments:
        text = argument.value if isinstance(argument, ast.Constant) else constants[argument.id]
        assert re.fullmatch(r"jax_splitk_\w+_v\d", text)


def test_ffi_calls_name_no_other_target() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ffi_call"):
                assert ast.unparse(node.args[0]) == "custom_call.target", name(path)


@pytest.mark.parametrize("path", sources(*FOLDERS), ids=name)
def test_no_file_is_large(path: pathlib.Path) -> None:
    assert path.stat().st_size <= 35_000


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


@pytest.mark.parametrize("path", sources("jax_splitk", "ffi"), ids=name)
def test_code_that_runs_or_builds_uses_no_nvcc(path: pathlib.Path) -> None:
    code = code_without_comments(path)
    assert not re.search(r"nvcc|enable_language\(CUDA|find_package\(CUDA|LANGUAGES[^)]*CUDA|CUDA_HOME", code)


def test_nvcc_would_be_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text('"""No nvcc."""\n# nvcc\nrun(["nvcc", "x.cu"])\n')
    assert code_without_comments(tmp_path / "a.py").count("nvcc") == 1
    (tmp_path / "CMakeLists.txt").write_text("# no nvcc\nproject(x LANGUAGES CXX CUDA)\n")
    assert "nvcc" not in code_without_comments(tmp_path / "CMakeLists.txt")
    assert "CUDA" in code_without_comments(tmp_path / "CMakeLists.txt")


def test_host_code_includes_no_cuda_header() -> None:
    for path in sources("ffi"):
        assert not re.search(r'#include\s*[<"](cuda|cuda_runtime|driver_types|nvrtc)[\w]*\.h[>"]', path.read_text()), (
            path
        )


@pytest.mark.parametrize("path", [p for p in sources("jax_splitk") if p.suffix == ".py"], ids=name)
def test_modules_have_docstrings(path: pathlib.Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_package_shows_its_public_names_only() -> None:
    names: dict[str, object] = {}
    exec("from jax_splitk import *", names)
    assert names.keys() - {"__builtins__"} == set(jax_splitk.__all__)
    assert {name for name in dir(jax_splitk) if not name.startswith("__")} == set(jax_splitk.__all__)
    assert not any(isinstance(value, types.ModuleType) for value in names.values())
