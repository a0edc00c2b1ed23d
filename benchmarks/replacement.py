"""Which units a full cache should give up: misses of our policy against others, on all traces.

    python -m benchmarks.replacement [--json FILE] [--states N] [--units N]

`ours` is `sparse_kvcm.ops.resolve` on the CPU backend: entries and a histogram of 256 buckets. The
others are whole:

    lru, fifo, random   by exact order
    hits        the age is divided by one more than the hits since the unit came in, up to 15: what
                four more bits of an entry could do
    segmented   units that were never hit go as if they were two steps older
    count       the least selected go; what was counted fades by a fifth in each step
    near        LRU, but units ranked between k and 2k count as selected: they cost no fetch, and
                the indexer must name them
    score       those of the least score go: all scores must be known
    optimum     Belady's, which knows what comes

All start empty; misses are counted in the same steps.
The second table divides one budget of slots among the groups of a model whose layers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.traces import PRESETS, DriftTraces
from sparse_kvcm import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from run_bench import commit, print_table

K = 2048
WARM_UP, COUNTED, AHEAD = 60, 150, 50  # steps; `optimum` looks ahead to the last
FACTORS = (1, 2, 4)
GRID = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# Layers of a model by preset, in percent; from the overlaps that are published of DeepSeek-V3.2.
MIX = {"v32_first": 3, "restless": 10, "v32_mid": 50, "glm51": 27, "calm": 10}

Selections = list[np.ndarray]


@dataclass(frozen=True)
class Trace:
    """Steps of one request that grows by a unit a step.

    Attributes
    ----------
    selections : list of ndarray, int64, shape (k,)
    near : list of ndarray, int64, shape (k,)
        The next best units.
    scores : list of ndarray, float32, shape (units,)
    """

    selections: Selections
    near: Selections
    scores: list[np.ndarray]


def make_trace(preset: str, units: int, seed: int) -> Trace:
    """Steps from `units` units on."""
    steps = WARM_UP + COUNTED + AHEAD
    traces = DriftTraces(PRESETS[preset], 1, units + steps, K, seed)
    made = Trace([], [], [])
    for t in range(steps):
        scores = traces.scores(torch.tensor([units + t + 1]))[0]
        best = scores.topk(2 * K).indices.numpy()
        made.selections.append(best[:K])
        made.near.append(best[K:])
        made.scores.append(scores.numpy())
    return made


def misses_of_ours(trace: Selections, units: int, slots: int) -> float:
    """Share of the selections that `ops.resolve` misses; its window is one unit wide."""
    entries = np.full(slots + 1, 0xFFFFFFFF, np.uint32)
    last, out = np.zeros(1, np.uint32), ops.ResolveOutputs.empty(1, K, 1)
    rows, missed = np.zeros(1, np.int32), 0
    for t, selection in enumerate(trace[: WARM_UP + COUNTED]):
        length = units + t + 1
        state = np.array([[0, 0, slots, 1, length, length - 1, length - 1, length - 1]], np.int32)
        step = np.array([t + 1, 1], np.uint32)
        ops.resolve(selection[None].astype(np.int32), rows, state, step, entries, last, out=out)
        missed += int(out.miss_counts[0]) if t >= WARM_UP else 0
    return missed / (COUNTED * K)


class Cache:
    """A cache of `slots` units that fetches whatever is selected."""

    def __init__(self, units: int, slots: int, seed: int) -> None:
        self.slots = slots
        self.resident = np.zeros(units, bool)
        self.last = np.zeros(units, np.int64)
        self.arrived = np.zeros(units, np.int64)
        self.hits = np.zeros(units, np.int64)
        self.next_use = np.zeros(units, np.int64)
        self.count = np.zeros(units)
        self.scores = np.zeros(units, np.float32)
        self.random = np.random.default_rng(seed)

    def misses(self, policy: str, trace: Trace) -> float:
        """Share of the selections that miss."""
        future = next_uses(trace.selections, len(self.resident)) if policy == "optimum" else None
        missed = 0
        for t, selection in enumerate(trace.selections[: WARM_UP + COUNTED]):
            hit = self.resident[selection]
            new = selection[~hit]
            missed += len(new) if t >= WARM_UP else 0
            self.last[selection] = t
            self.hits[selection] = np.where(hit, np.minimum(self.hits[selection] + 1, 15), 0)
            self.arrived[new] = t
            self.count *= 0.8
            self.count[new] = 0
            self.count[selection] += 1
            self.scores = trace.scores[t]
            if policy == "near":
                self.last[trace.near[t]] = t
            if future is not None:
                self.next_use[selection] = future[t]
            self._make_room(policy, selection, len(new), t)
            self.resident[selection] = True
        return missed / (COUNTED * K)

    def _make_room(self, policy: str, selection: np.ndarray, new: int, t: int) -> None:
        over = int(self.resident.sum()) + new - self.slots
        if over <= 0:
            return
        unselected = self.resident.copy()
        unselected[selection] = False
        there = np.nonzero(unselected)[0]
        badness = self._badness(policy, there, t)
        self.resident[there[np.argpartition(badness, len(there) - over)[len(there) - over :]]] = 0

    def _badness(self, policy: str, there: np.ndarray, t: int) -> np.ndarray:
        if policy in ("lru", "near"):
            return -self.last[there]
        if policy == "segmented":
            return t - self.last[there] + 2 * (self.hits[there] == 0)
        if policy == "count":
            return -self.count[there]
        if policy == "score":
            return -self.scores[there]
        if policy == "fifo":
            return -self.arrived[there]
        if policy == "hits":
            return (t - self.last[there]) / (1 + self.hits[there])
        if policy == "random":
            return self.random.random(len(there))
        return self.next_use[there]


POLICIES = (
    "lru", "fifo", "random", "hits", "segmented", "count", "near", "score", "optimum"
)  # fmt: skip


def next_uses(trace: Selections, units: int) -> Selections:
    """The step in which each selected unit is selected next; far away if in none."""
    following = np.full(units, len(trace) + 1, np.int64)
    uses = []
    for t in range(len(trace) - 1, -1, -1):
        uses.append(following[trace[t]].copy())
        following[trace[t]] = t
    return uses[::-1]


def study(units: int, states: int) -> list[dict[str, object]]:
    """A record per preset, factor and policy: the mean over random states, and each of them."""
    records = []
    for preset in PRESETS:
        shares: dict[tuple[int, str], list[float]] = {}
        for seed in range(states):
            trace = make_trace(preset, units, seed)
            total = units + len(trace.selections) + 1
            for factor in FACTORS:
                slots = factor * K
                ours = misses_of_ours(trace.selections, units, slots)
                shares.setdefault((factor, "ours"), []).append(ours)
                for policy in POLICIES:
                    if factor > 1 or policy == "lru":  # k slots leave nothing to choose
                        share = Cache(total, slots, seed).misses(policy, trace)
                    shares.setdefault((factor, policy), []).append(share)
        for (factor, policy), each in shares.items():
            record = {"preset": preset, "units": units, "k": K, "slots": factor * K}
            mean = float(np.mean(each))
            records.append(record | {"policy": policy, "miss_share": mean, "states": each})
    return records


def divide_budget(units: int, factor: float) -> dict[str, object]:
    """Slots per layer: the same for all, or greedily where a slot saves most, of one budget."""
    curves = {
        preset: [misses_of_ours(trace.selections, units, int(one * K)) for one in GRID]
        for preset in MIX
        for trace in [make_trace(preset, units, 0)]
    }
    equal = {preset: GRID.index(factor) for preset in MIX}
    chosen = dict.fromkeys(MIX, 0)
    left = sum(MIX.values()) * (factor - GRID[0])
    while True:
        steps = [
            (curves[p][i] - curves[p][j], MIX[p] * (GRID[j] - GRID[i]), p, j)
            for p, i in chosen.items()
            for j in range(i + 1, len(GRID))
            if MIX[p] * (GRID[j] - GRID[i]) <= left + 1e-9
        ]
        gains = [(MIX[p] * saved / cost, cost, p, j) for saved, cost, p, j in steps]
        if not gains or max(gains)[0] <= 0:
            break
        _, cost, preset, j = max(gains)
        chosen[preset], left = j, left - cost

    def share(at: dict[str, int]) -> float:
        return sum(MIX[p] * curves[p][i] for p, i in at.items()) / sum(MIX.values())

    return {
        "layers_percent": MIX,
        "mean_factor": factor,
        "equal_miss_share": share(equal),
        "divided_miss_share": share(chosen),
        "divided_factors": {preset: GRID[i] for preset, i in chosen.items()},
    }


def show(records: list[dict[str, object]], budgets: list[dict[str, object]]) -> None:
    """Print both tables."""
    policies = ("ours", *POLICIES)
    cells = {(r["preset"], r["slots"], r["policy"]): r["miss_share"] for r in records}
    rows = [
        [preset, f"{f}k", *(f"{100 * cells[preset, f * K, policy]:.2f}" for policy in policies)]
        for preset in PRESETS
        for f in FACTORS
    ]
    print_table(("trace", "slots", *policies), rows, "misses, % of a selection")
    rows = []
    for one in budgets:
        shares = [f"{100 * one[name]:.2f}" for name in ("equal_miss_share", "divided_miss_share")]
        rows.append([f"{one['mean_factor']}k", *shares, str(one["divided_factors"])])
    print_table(("slots per layer", "equal, %", "divided, %", "factors"), rows, "one budget")


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replacement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the records")
    parser.add_argument("--states", type=int, default=5, help="random states (default: 5)")
    parser.add_argument("--units", type=int, default=65_536, help="history (default: 65,536)")
    arguments = parser.parse_args()
    if arguments.states < 1:
        parser.error(f"--states must be at least 1, got {arguments.states}")
    if not 2 * K <= arguments.units < 1 << 24:
        parser.error(f"--units must be in [{2 * K}, 2^24), got {arguments.units}")
    if arguments.json and (
        arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()
    ):
        parser.error(
            f"--json must be a file in a folder that is there, got {str(arguments.json)!r}"
        )
    records = study(arguments.units, arguments.states)
    budgets = [divide_budget(arguments.units, factor) for factor in (2.0, 4.0)]
    show(records, budgets)
    if arguments.json:
        command = f"{parser.prog} --units {arguments.units} --states {arguments.states}"
        about = {"command": command, "commit": commit()}
        about["machine"] = f"{len(os.sched_getaffinity(0))} cores"
        steps = {"warm_up": WARM_UP, "counted": COUNTED, "ahead": AHEAD}
        text = json.dumps(about | {"steps": steps, "misses": records, "budgets": budgets}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
