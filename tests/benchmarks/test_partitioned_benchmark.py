"""benchmarks/partitioned.py on small nets: its variants compute the same, and its report."""

import json
import pathlib

import jax
import numpy as np
import pytest

from benchmarks import partitioned
from benchmarks.models.resnet import Net, initial

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices"),
]


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(partitioned, "TINY", Net((1,), 4, 16, 3))
    path = tmp_path / "report.json"
    partitioned.main(["--tiny", "--devices", "2", "--batch", "2", "--rounds", "1", "--json", str(path)])
    found = json.loads(path.read_text())["variants"]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[-3:]] == list(found)
    by_jit, by_hand, stock = (found[name] for name in ("jit", "shard_map", "lax"))
    np.testing.assert_allclose(by_jit["losses"], by_hand["losses"], rtol=1e-5)
    np.testing.assert_allclose(by_jit["losses"], stock["losses"], rtol=0.02)
    assert by_jit["losses"][-1] < by_jit["losses"][0]
    assert by_jit["our_custom_calls"] == by_hand["our_custom_calls"] == by_jit["operations"] == 5
    assert stock["our_custom_calls"] == 0
    assert by_jit["collectives"]["all-gather"] == 0
    assert by_jit["explained_as_lowered"]
    assert {kernel["problem"] for kernel in by_jit["kernels"]} == {kernel["problem"] for kernel in by_hand["kernels"]}


def test_the_usual_net_is_a_resnet_50() -> None:
    sizes = [leaf.size for leaf in jax.tree.leaves(initial(Net()))]
    assert sum(sizes) == 25_557_032
    assert partitioned.arguments([]).batch == 256
