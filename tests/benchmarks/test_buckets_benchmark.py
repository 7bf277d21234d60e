"""benchmarks/buckets.py on small shapes."""

import json
import pathlib

import jax
import pytest

from benchmarks import buckets

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


def test_report(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    assert buckets.main(["--cases", "192x128", "--n", "5", "8", "--seconds", "0.05", "--json", str(file)]) == 0
    fewer, own = json.loads(file.read_text())["results"]
    assert (own["of"], own["loss"]) == (None, None)
    assert fewer["of"] in (8, None)
    assert (fewer["loss"] is None) == (fewer["of"] is None)


def test_summary() -> None:
    case, times = buckets.Case(192, 128, 5), {}
    for name, us in (("tuned", 10.0), ("served", 10.5)):
        times[name] = buckets.timing.Timing(us, us, {}, {}, us, us, "wall", 1, 1)
    found = [buckets.Result(case, 8, "a", "b", times), buckets.Result(case, 8, "a", "a", {})]
    found += [buckets.Result(case, None, "a", "", {}), buckets.Result(case, 16, "xla", "a", times)]
    assert list(buckets.summary(found)) == [
        "3 of 4 are served by the decisions of 2",
        "loss: 3.3% in the mean, 5.0% at most (192x128_n5), 2 over 3%",
        "XLA instead of ours, or ours instead of XLA: 192x128_n5",
    ]
    assert "| 8 rows " in buckets.table(found)
