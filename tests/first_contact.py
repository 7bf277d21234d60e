"""Follows the README as a stranger would: runs its commands and its code in order, in a copy of the checkout and a
fresh environment. `.ci/package` runs this, with a folder to work in.

The plain install comes first, then the extra. `make` commands are `.ci/run`'s, and the wheel is `.ci/package`'s. The
extra `cuda13` is two gigabytes: `compiler` is installed instead, the part of it that needs no GPU."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.documents import markdown  # noqa: E402 - from the path above

# Unlike newer ones, it reads no inline table of several lines in pyproject.toml.
OLD_PIP = "pip==21.1.3"
# Whether explain(platform="cuda") names kernels if their compiler is not installed.
EXPLAINS_WITHOUT_COMPILER = True

# The question of the README's own block, for an H200; `loss`, `w` and `x` are the block's.
EXPLAIN = """
report = str(jax_splitk.explain(jax.grad(loss), w, x, platform="cuda"))
print(report)
if {named}:
    assert "wgrad_im2col" in report and "us saved" in report.splitlines()[-1], report
"""
# Checks which package is imported: inside the checkout, its folder comes first on the path.
WHOSE = """
import jax_splitk, pathlib
from jax_splitk import _ffi
assert pathlib.Path(jax_splitk.__file__).parent == pathlib.Path.cwd() / "jax_splitk", jax_splitk.__file__
assert not pathlib.Path(_ffi.__file__).is_relative_to(pathlib.Path.cwd()), _ffi.__file__
"""


class Reader:
    """A reader in a copy of the checkout, with an environment in which nothing is installed yet."""

    def __init__(self, work: pathlib.Path) -> None:
        self.home, self.checkout, environment = work, work / "checkout", work / "reader"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        with tarfile.open(work / "checkout.tar", "w") as archive:
            for file in filter(None, files):
                if (ROOT / file).exists():  # else deleted, and not committed
                    archive.add(ROOT / file, file)
        with tarfile.open(work / "checkout.tar") as archive:
            archive.extractall(self.checkout, filter="data")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        self.commands = environment / "bin"
        if sys.version_info < (3, 12):
            self.shell(f"python -m pip install --quiet {OLD_PIP}")

    def shell(self, command: str) -> None:
        """Runs a command line in the checkout. Only pip finds the machine's programs, such as g++."""
        print(f"$ {command}", flush=True)
        clean = {"HOME": str(self.home), "PATH": str(self.commands), "JAX_PLATFORMS": "cpu"}
        if "pip " in command:
            clean = {**os.environ, "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}"}
            command = f"{command} --quiet"
        subprocess.run(["/bin/sh", "-ec", command], cwd=self.checkout, env=clean, check=True)

    def python(self, page: str, folder: str = ".", after: str = "") -> None:
        """Runs the Python blocks of a page as one program, from standard input."""
        print(f"$ python < the code of {page}, in {folder}", flush=True)
        code = "\n".join(block.text for block in markdown.blocks(self.checkout / page) if block.language == "python")
        clean = {"HOME": str(self.home), "PATH": str(self.commands), "JAX_PLATFORMS": "cpu"}
        command, cwd = [self.commands / "python", "-"], self.checkout / folder
        subprocess.run(command, input=f"{code}\n{after}", cwd=cwd, env=clean, check=True, text=True)

    def lines(self, page: str) -> list[str]:
        """The command lines of a page, without comments, and without those of `make` and of the wheel."""
        blocks = [block.text for block in markdown.blocks(self.checkout / page) if block.language == "bash"]
        lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
        return [line for line in lines if line and not line.startswith("make ")]


def main(work: pathlib.Path) -> None:
    reader = Reader(work)
    commands = reader.lines("README.md")
    extras = [line for line in commands if "[" in line]
    assert extras and commands[0] == "pip install ." and "jax-splitk doctor" in commands, commands
    for line in (line for line in commands if line not in extras):
        reader.shell(line)
    first, *_ = (b.text for b in markdown.blocks(reader.checkout / "README.md") if b.language == "python")
    (work / "train.py").write_text(first)
    reader.python("README.md", after=f"{first}\n{EXPLAIN.format(named=EXPLAINS_WITHOUT_COMPILER)}\n{WHOSE}")
    reader.python("docs/quick-start.md")
    reader.shell("jax-splitk --version && jax-splitk && python -m jax_splitk doctor")
    reader.shell(f"jax-splitk explain {work}/train.py --platform cuda")
    reader.shell("python -m benchmarks.wgrad --help")
    for line in extras:
        reader.shell(line.replace("cuda13", "compiler"))
    reader.python("README.md", after=f"{first}\n{EXPLAIN.format(named=True)}")
    reader.shell("jax-splitk doctor")
    (install,) = reader.lines("examples/custom_kernel/README.md")
    reader.shell(install)
    for folder in (".", "examples/custom_kernel"):
        reader.python("examples/custom_kernel/README.md", folder)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
