"""Both ways to start the command line: which modules they import, and that another program's -m gets the whole
package."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = "import sys\nfrom jax_splitk.__main__ import main\nsys.exit(main())\n"  # as pip writes it


def run(folder: pathlib.Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *flags, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("start", [("-m", "jax_splitk"), ("jax-splitk",)], ids=["module", "script"])
def test_help_imports_no_jax_and_commands_do(start: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    (tmp_path / "jax-splitk").write_text(SCRIPT)
    done = run(tmp_path, *start, "explain", "--help", flags=("-X", "importtime"))
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {'python ' * (start[0] == '-m')}{' '.join(start)} explain")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "jax_splitk" in imported
    assert not imported & {"jax", "numpy"}
    (tmp_path / "train.py").write_text("import jax_splitk\nprint(jax_splitk.conv_wgrad.__name__)\n")
    done = run(tmp_path, *start, "explain", "train.py")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "conv_wgrad"), done.stderr


def test_a_package_that_runs_by_m_gets_every_public_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import jax_splitk\n")
    (tmp_path / "mine" / "train.py").write_text("import jax_splitk\nprint(jax_splitk.explain.__name__)\n")
    done = run(tmp_path, "-m", "mine.train", "jax_splitk")
    assert (done.returncode, done.stdout) == (0, "explain\n"), done.stderr
