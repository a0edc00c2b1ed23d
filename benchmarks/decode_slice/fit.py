"""Costs of the planner's steps, fitted to runs, and how far each run is missed.

    python -m benchmarks.decode_slice.fit [FILE]

Each part is fitted by itself, by the method of least squares of relative errors, to runs without
overlap; parts of a run are scaled to add up to its median step. Then each run is left out in turn,
and each model, and predicted from the others, with the miss share of the planner's curve.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_slice.report import read, step_of
from sparse_kvcm.planner.step_time import H200, Costs

Record = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results" / "h200" / "decode_slice.json"
PARTS = {"resolve": "cache", "flush": "cache", "convert": "cache"}  # others have their own name


def fit(runs: list[Record]) -> Costs:
    """Costs by part."""
    sums, times = defaultdict(list), defaultdict(list)
    for run in runs:
        step = step_of(run, measured=True)
        scale = run["step_ms"] / sum(run["phases_ms"].values())
        parts: dict[str, float] = defaultdict(float)
        for phase, ms in run["phases_ms"].items():
            parts[PARTS.get(phase, phase)] += scale * ms
        for part, sum_ in step.sums().items():
            sums[part].append(sum_)
            times[part].append(parts[part])
    return {part: _solve(np.array(sums[part]), np.array(times[part])) for part in sums}


def _solve(sums: np.ndarray, times: np.ndarray) -> tuple[float, ...]:
    """Costs >= 0: of those that come out below, the least is taken for 0, and so on."""
    used = np.any(sums > 0, axis=0)
    while True:
        costs = np.zeros(sums.shape[1])
        found, *_ = np.linalg.lstsq(sums[:, used] / times[:, None], times / times, rcond=None)
        costs[used] = found
        if costs.min() >= 0:
            return tuple(float(f"{cost:.4g}") for cost in costs)
        used[costs.argmin()] = False


def errors(runs: list[Record], costs: Costs) -> list[float]:
    """Predicted by measured step, less one."""
    return [sum(step_of(run).parts_ms(costs).values()) / run["step_ms"] - 1 for run in runs]


def left_out(runs: list[Record], *names: str) -> list[float]:
    """Errors of runs by costs of those that differ in any of the fields `names`."""
    found = []
    for run in runs:
        others = [one for one in runs if any(one[name] != run[name] for name in names)]
        found += errors([run], fit(others))
    return found


def usable(runs: list[Record]) -> list[Record]:
    """Runs that the model describes."""
    return [run for run in runs if run["overlap"] == "none" and step_of(run) is not None]


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_slice.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    file = parser.parse_args().file
    try:
        runs = usable(read(file))
    except ValueError as error:
        parser.error(str(error))
    if len({run["model"] for run in runs}) < 2:
        parser.error(f"{str(file)!r} must have runs of two models that the planner knows, on a GPU")
    for part, costs in fit(runs).items():
        print(f'    "{part}": {costs},')
    same = ("model", "prompt", "batch")  # both sides: they differ little
    columns = [
        errors(runs, H200), errors(runs, fit(runs)), left_out(runs, *same), left_out(runs, "model")
    ]  # fmt: skip
    print("step of              measured | costs in force, fitted, run left out, model left out")
    for run, *each in zip(runs, *columns, strict=True):
        name = f"{run['model']} {run['prompt']} {run['mode']} {run['batch']}"
        print(f"{name:34} {run['step_ms']:7.2f} ms", *(f"{error:+7.1%}" for error in each))
    print(f"{'largest':34}        ", *(f"{max(map(abs, each)):8.1%}" for each in columns))


if __name__ == "__main__":
    main()
