"""`.ci/release --check` lets only a finished checkout through, and the files of a project agree."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import jax_splitk

ROOT = pathlib.Path(__file__).parents[1]
FILES = ("jax_splitk/__init__.py", "CHANGELOG.md", "CITATION.cff", ".ci/release")
VERSION = jax_splitk.__version__
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


class Repository:
    """A repository with the files that a release depends on, ready for a release."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.git("init", "--quiet")
        changes = (folder / "CHANGELOG.md").read_text()
        self.write(
            "CHANGELOG.md", re.sub(r"^## .*$", f"## {VERSION} (2030-01-31)", changes, count=1, flags=re.MULTILINE)
        )

    def git(self, *words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=self.folder, check=True, capture_output=True)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", name)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new, 1))

    def check(self, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHONS": python, "HOME": str(self.folder)}
        command = [self.folder / ".ci" / "release", "--check"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> Repository:
    return Repository(tmp_path)


def test_a_finished_checkout_may_be_released(repository: Repository) -> None:
    done = repository.check()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"== version {VERSION} of commit ")


def test_what_is_not_finished_is_refused(repository: Repository) -> None:
    def refusal(python: str = sys.executable) -> str:
        done = repository.check(python)
        assert done.returncode == 1
        assert done.stdout == ""
        return done.stderr

    assert "no-such-python is not there, or older than Python 3.11" in refusal("no-such-python")
    repository.git("tag", f"v{VERSION}")
    assert f"the tag v{VERSION} is there; raise __version__" in refusal()
    repository.git("tag", "--delete", f"v{VERSION}")
    repository.replace("CITATION.cff", f"version: {VERSION}", "version: 0.0.9")
    assert f"CITATION.cff has another version than {VERSION}" in refusal()
    repository.replace("CHANGELOG.md", "(2030-01-31)", "(not released)")
    assert f"CHANGELOG.md begins with '## {VERSION} (not released)'; accepted: '## {VERSION} (YYYY-MM-DD)'" in refusal()
    (repository.folder / "more.txt").touch()
    assert "the checkout has changes that are not committed" in refusal()
    repository.replace("jax_splitk/__init__.py", f'"{VERSION}"', '"0.2"')
    assert "__version__ = '0.2' in jax_splitk/__init__.py; accepted: major.minor.patch" in refusal()


def test_the_files_of_the_project_have_its_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    (heading, *_) = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[0] == VERSION
    assert heading[1] == "not released" or re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1])


def test_pyproject_is_what_old_pips_read() -> None:
    """pip 21.1 does not read inline tables of several lines."""
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.findall(r"^\w[\w-]* = \{(?![^\n]*\}\s*(?:#[^\n]*)?$)[^\n]*$", text, re.MULTILINE)
    readme = tomllib.loads(text)["project"]["readme"]
    assert (ROOT / readme).is_file()
    assert readme in tomllib.loads(text)["tool"]["scikit-build"]["sdist"]["include"]


@pytest.mark.parametrize("name", ["SECURITY.md", "CITATION.cff", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*") if path.is_file()
)])  # fmt: skip
def test_no_address_is_invented(name: str) -> None:
    """There is no host yet: an address would lead nowhere."""
    text = (ROOT / name).read_text()
    assert not re.findall(r"https?://|\b[\w.]+@[\w.]+\.\w+", text)
