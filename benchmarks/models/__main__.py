"""Whole training steps: stock JAX against jax_splitk. See ../README.md.

python -m benchmarks.models [NAME ...] [--out benchmarks/results/models_h200.json] [--tiny]
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks import models, report
from benchmarks.models.measure import Settings, measure
from benchmarks.models.passes import WEIGHT
from benchmarks.report import on_gpu, percent, say

# The entries in which all figures of one file must agree.
SAME = ("platform", "device_kind", "driver", "jax", "jaxlib", "jax_splitk", "plan_version", "kernel_sources")


def table(results: Sequence[dict[str, Any]]) -> str:
    header = ["model", "stock ms", "jax_splitk ms", "ratio", "weight gradients", "peak GB", "stock peak GB"]
    header += ["loss difference", "tuning s", "lowering s"]
    rows = [header]
    for r in results:
        stock, ours = r["stock"], r["ours"]
        shares = stock["passes_ms"]
        tuning = ours["tuning_seconds"]
        rows.append(
            [
                *(r["title"], f"{stock['ms']:.2f}", f"{ours['ms']:.2f}", f"{r['ratio']:.2f}"),
                percent(shares and shares[WEIGHT] / shares["busy"]),
                *(f"{v['peak_bytes'] * 1e-9:.2f}" for v in (ours, stock)),
                *(f"{r['loss_difference']:.1e}", "" if tuning is None else f"{tuning:.1f}"),
                f"{ours['lowering_seconds']:.1f}",
            ]
        )
    return report.markdown(rows)


def earlier(path: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    """The results that a report has, by name. Raises ValueError if the report's figures do not fit this run."""
    if path is None or not path.exists():
        return {}
    found, here = json.loads(path.read_text()), report.environment()
    if found.get("benchmark") != "models":
        raise ValueError(f"--out={path}: not a report of benchmarks.models; accepted: one, or a new file")
    differing = [name for name in SAME if found["environment"].get(name) != here[name]]
    if differing:
        raise ValueError(f"--out={path}: it was measured with other {', '.join(differing)}; accepted: a new file")
    return {result["name"]: result for result in found["results"]}


def write(path: pathlib.Path, results: dict[str, dict[str, Any]], failures: dict[str, str]) -> None:
    ordered = [results[name] for name in models.MODELS if name in results]
    whole = {"benchmark": "models", "environment": report.environment(), "results": ordered, "failures": failures}
    report.write(path, whole)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description="Whole training steps: stock JAX against jax_splitk."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(models.MODELS)}; all")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json", help="write, or add to, a report")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it on a CPU")
    parser.add_argument("--losses", type=int, default=50, metavar="N", help="steps whose losses are compared; 50")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each variant; 5")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="in a round; 10")
    parser.add_argument(
        "--tune",
        action=argparse.BooleanOptionalAction,
        default=on_gpu(),
        help="tune what no cache has, JAX_SPLITK_TUNE_BUDGET_S a problem; the default on a GPU. Without it the cost "
        "model decides what no cache has",
    )
    options = parser.parse_args(argv)
    for name in ("losses", "rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}; accepted: an integer of at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        selected = models.find(options.names, options.tiny)
        results = earlier(options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.tune:
        os.environ["JAX_SPLITK_AUTOTUNE"] = "off"
    settings = Settings(options.losses, options.rounds, options.steps, options.tune)
    measured: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for model in selected:
        try:
            measured.append(measure(model, settings))
            found = measured[-1]
            results[model.name] = found
            times = f"stock {found['stock']['ms']:.2f} ms, jax_splitk {found['ours']['ms']:.2f} ms"
            say(f" > {model.title}: {times}, {found['ratio']:.2f} times as fast")
        except Exception as error:  # continue with the other models
            failures[model.name] = traceback.format_exc()
            say(report.failed_line(model.name, error))
        if options.out:  # after every model, so that a run that is cut short loses nothing
            write(options.out, results, failures)
    if measured:
        say("\n" + table(measured) + "\n")
        say(f"geometric mean of the ratio: {statistics.geometric_mean(r['ratio'] for r in measured):.3f}")
    if failures:
        say(f"failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
