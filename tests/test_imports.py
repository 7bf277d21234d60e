"""Which modules `import jax_splitk` loads: those for lowering, progress bars or the command line are loaded later."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax_splitk
from jax_splitk.kernels import catalogue
from tests.problems import SEED
from tests.tuning_cache import finish, start

LOADS = """
import json, sys
import jax
before = set(sys.modules)
import jax_splitk
first = set(sys.modules)
jax_splitk.kernels.families("conv_wgrad")
print(json.dumps([sorted(first - before), sorted(set(sys.modules) - first)]))
"""
WAITS = {"equinox", "flax", "jax_splitk.cli", "jax_splitk.tuning.bar", "matplotlib", "qwix", "scipy", "tqdm"}


def test_import_loads_no_family_and_nothing_heavy() -> None:
    (((first, then), _),) = finish(start(LOADS))
    families = {of.__module__ for those in catalogue.FAMILIES.values() for f in those for of in (type(f), f.Config)}
    families = {module for module in families if module.startswith("jax_splitk.")}
    assert len(families) > 20
    assert "jax_splitk.tuning.progress" in first, "these are modules' names"
    assert not set(first) & (families | WAITS)
    assert families <= set(then)


def test_what_has_no_compiled_part_says_so(tmp_path: pathlib.Path) -> None:
    """A zip archive cannot hold it, and a checkout has none before it is built."""
    package = pathlib.Path(jax_splitk.__file__).parent
    archive, checkout = tmp_path / "packages.zip", tmp_path / "checkout"
    shutil.copytree(package, checkout / "jax_splitk", ignore=shutil.ignore_patterns("_ffi*", "__pycache__"))
    shutil.make_archive(str(archive.with_suffix("")), "zip", checkout)
    for place in (archive, checkout):
        # Without site-packages, jax among them: nothing else is imported before.
        command = [sys.executable, "-S", "-c", "import jax_splitk"]
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        said = done.stderr.splitlines()[-1]
        assert said.startswith(f"ImportError: jax_splitk has a compiled part, jax_splitk._ffi, which is not in {place}")
        assert said.endswith("it cannot be imported from a zip archive")


INTERRUPTED = """
import json, math, random, sys
from jax import numpy as jnp
import jax_splitk
from jax_splitk import kernels

def interrupt_after(events):
    def trace(frame, *_):
        nonlocal events
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None  # Python itself does not bear an interrupt everywhere
        events -= 1
        if events == 0:
            raise KeyboardInterrupt
        return trace
    return trace

rng, before, interrupts = random.Random(int(sys.argv[1])), set(sys.modules), 0
for _ in range(10):
    for name in set(sys.modules) - before:  # as in a fresh process
        folder, _, file = name.rpartition(".")
        vars(sys.modules.get(folder, sys)).pop(file, None)
        del sys.modules[name]
    while True:  # loading them all takes 130,000 events
        try:
            sys.settrace(interrupt_after(int(math.exp(rng.uniform(0, math.log(200_000))))))
            kernels.families("conv_wgrad")
            break
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
    for family in sum(map(kernels.families, ("conv_fprop", "conv_dgrad", "conv_wgrad", "dot_general")), ()):
        for found in (type(family), family.Config):
            assert getattr(sys.modules[found.__module__], found.__name__) is found, (family, found)

from jax_splitk.kernels.cpu import wgrad as host
config = host.Config(2, 16)
x, g = jnp.ones((2, 8, 8, 3)), jnp.ones((2, 8, 8, 5))
numbers = ("NHWC", "HWIO", "NHWC")
out = jax_splitk.conv_wgrad(x, g, (3, 3, 3, 5), (1, 1), "SAME", dimension_numbers=numbers, config=config)
print(json.dumps([interrupts, float(out[1, 1, 0, 0])]))
"""


def test_ctrl_c_while_families_load_leaves_them_whole() -> None:
    (((interrupts, value), _),) = finish(start(INTERRUPTED, SEED))
    assert interrupts >= 10, f"seed {SEED}"
    assert value == 2 * 8 * 8
