"""Records of all runs in one JSON file, what the planner would have said, and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.decode_slice.clock import PHASES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from run_bench import print_table

KEY = ("model", "layers", "prompt", "mode", "batch", "factor", "overlap", "trace", "experts")
# The planner's curve for each trace, where there is one.
CURVES = {("v4-flash", "glm51"): "v4_flash", ("", "glm51"): "glm51", ("", "v32_mid"): "v32_mid"}

Record = dict[str, Any]


def merge(path: Path, records: Iterable[Record]) -> list[Record]:
    """Put records into a file, in the place of older ones of the same run; return all of them."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    by_key = {key_of(one): one for one in [*runs, *records]}
    order = ("model", "layers", "prompt", "mode", "factor", "overlap", "batch")
    merged = sorted(by_key.values(), key=lambda one: tuple(one[name] for name in order))
    for one in merged:
        predict(one, merged)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"peaks": peaks(merged), "runs": merged}, indent=1) + "\n")
    return merged


def key_of(record: Record) -> tuple[Any, ...]:
    """What tells runs apart."""
    return tuple(record[name] for name in KEY)


def predict(record: Record, records: list[Record]) -> None:
    """Add what the planner's model of time says: a resident step and a fetch that nothing hides.

    The resident step of the same batch is taken from the runs, between or beyond them by the line
    through the nearest two. A resident run of just as many requests tells what offload costs them.
    """
    curve = CURVES.get((record["model"], record["trace"]), CURVES.get(("", record["trace"])))
    link = record.get("link_gb_s")
    resident = sorted(
        (one["batch"], one["step_ms"])
        for one in records
        if one["mode"] == "resident"
        and all(one[name] == record[name] for name in ("model", "layers", "prompt", "experts"))
    )
    same = [ms for batch, ms in resident if batch == record["batch"]]
    if record["mode"] == "offloaded" and same:
        record["step_over_resident"] = record["step_ms"] / same[0]
    if record["mode"] != "offloaded" or curve is None or not link or not resident:
        return
    try:
        from sparse_kvcm.planner import LOCALITIES
    except ImportError:  # pydantic is not there; merging the file elsewhere adds what lacks
        return
    if record["units"] > record["lease_slots"]:
        share = LOCALITIES[curve].miss_share(record["factor"])
    else:
        share = 0.0
    fetch = record["batch"] * record["row_bytes"] * record["top_k"] * share / link / 1e6
    step = _on_line(resident, record["batch"]) + fetch
    record["predicted"] = {
        "miss_share": share,
        "fetch_ms": fetch,
        "step_ms": step,
        "tokens_per_s": 1000 * record["batch"] / step,
    }


def _on_line(points: list[tuple[int, float]], at: int) -> float:
    if len(points) == 1:
        return points[0][1]
    below = max((i for i, (x, _) in enumerate(points) if x <= at), default=0)
    i = min(below, len(points) - 2)
    (x0, y0), (x1, y1) = points[i : i + 2]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def peaks(records: list[Record]) -> list[Record]:
    """The best point of each sweep, against the best resident one."""
    best: dict[tuple[Any, ...], Record] = {}
    for one in records:
        key = tuple(one[name] for name in KEY if name != "batch")
        if key not in best or one["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = one
    shown = []
    for one in best.values():
        same = [
            other["tokens_per_s"]
            for other in best.values()
            if other["mode"] == "resident"
            and all(other[n] == one[n] for n in ("model", "layers", "prompt", "experts"))
        ]
        names = ("model", "prompt", "mode", "factor", "overlap", "batch", "tokens_per_s")
        record = {name: one[name] for name in names}
        record["over_resident"] = one["tokens_per_s"] / max(same) if same else None
        shown.append(record)
    return shown


def show(records: Iterable[Record]) -> None:
    """Print a row per run."""
    times = ("step", "p99", "host", *PHASES)
    columns = ("run", "batch", "tokens/s", *times, "hit %", "GB/s", "link %", "plan", "x")
    rows = []
    for one in records:
        run = f"{one['model']} {one['prompt'] // 1024}K {one['mode']}"
        if one["mode"] == "offloaded":
            run += f" {one['factor']:g} {one['overlap']}"
        share = one.get("link_share")
        rows.append([
            run, str(one["batch"]), f"{one['tokens_per_s']:.0f}", f"{one['step_ms']:.2f}",
            f"{one['step_ms_p99']:.2f}", f"{one['host_ms']:.2f}",
            *(f"{one['phases_ms'].get(name, 0):.2f}" for name in PHASES),
            f"{100 * one['hit_rate']:.1f}",
            "-" if share is None else f"{one['fetch_gb_s']:.1f}",
            "-" if share is None else f"{100 * share:.0f}",
            f"{one['predicted']['step_ms']:.2f}" if "predicted" in one else "-",
            f"{one['step_over_resident']:.3f}" if "step_over_resident" in one else "-",
        ])  # fmt: skip
    print_table(columns, rows, "steps of a slice, ms; x: by a resident step of as many requests")
