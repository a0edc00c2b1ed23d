"""Records of all runs in one JSON file, what the planner would have said, and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.decode_slice.clock import PHASES
from benchmarks.decode_slice.model import make_slice
from sparse_kvcm.ops import host_row

if TYPE_CHECKING:
    from sparse_kvcm.planner.step_time import Step

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from run_bench import print_table

SIDES = ("model", "layers", "prompt", "experts")
KEY = ("model", "layers", "prompt", "mode", "batch", "factor", "overlap", "trace", "experts")
FIELDS = (*KEY, "step_ms", "tokens_per_s", "phases_ms")
# The planner's curve for each trace, where there is one.
CURVES = {("v4-flash", "glm51"): "v4_flash", ("", "glm51"): "glm51", ("", "v32_mid"): "v32_mid"}

Record = dict[str, Any]


def merge(path: Path, records: Iterable[Record]) -> list[Record]:
    """Put records into a file, in the place of older ones of the same run; return all of them."""
    runs = read(path) if path.exists() else []
    by_key = {key_of(one): one for one in [*runs, *records]}
    order = ("model", "layers", "prompt", "mode", "factor", "overlap", "batch")
    merged = sorted(by_key.values(), key=lambda one: tuple(one[name] for name in order))
    for one in merged:
        predict(one, merged)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"peaks": peaks(merged), "runs": merged}, indent=1) + "\n")
    return merged


def read(path: Path) -> list[Record]:
    """Records of a file; raises ValueError where they are none."""
    try:
        runs = json.loads(path.read_text())["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        text = f"records must be in a file of bench_slice, got {str(path)!r}: {why}"
        raise ValueError(text) from error
    for one in runs if isinstance(runs, list) else [None]:
        lacks = [name for name in FIELDS if not isinstance(one, dict) or name not in one]
        if lacks:
            raise ValueError(f"records of {str(path)!r} lack {', '.join(lacks)}")
    return list(runs)


def middle(turns: Sequence[Record]) -> Record:
    """The record whose step is the median of several of one point, with the steps of all."""
    steps = [one["step_ms"] for one in turns]
    if len(turns) == 1:
        return turns[0]
    return {**sorted(turns, key=lambda one: one["step_ms"])[len(turns) // 2], "turns_ms": steps}


def key_of(record: Record) -> tuple[Any, ...]:
    """What tells runs apart."""
    return tuple(record[name] for name in KEY)


def predict(record: Record, records: list[Record]) -> None:
    """Add what the planner says of the step, and what offload costs as many requests."""
    same = [
        one["step_ms"]
        for one in records
        if one["mode"] == "resident" and all(one[n] == record[n] for n in (*SIDES, "batch"))
    ]
    if record["mode"] == "offloaded" and same:
        record["step_over_resident"] = record["step_ms"] / same[0]
    try:
        step = step_of(record)
    except ImportError:  # pydantic is not there; merging the file elsewhere adds what lacks
        return
    record.pop("predicted", None)
    if step is not None:
        parts = step.parts_ms()
        ms = sum(parts.values())
        record["predicted"] = {
            "miss_share": step.misses / record["top_k"],
            "parts_ms": parts,
            "step_ms": ms,
            "tokens_per_s": 1000 * record["batch"] / ms,
            "error": ms / record["step_ms"] - 1,
        }


def step_of(record: Record, *, measured: bool = False) -> Step | None:
    """The planner's step of a run; None where it does not know the model or the trace.

    Parameters
    ----------
    record : dict
    measured : bool
        With the misses of the run instead of the planner's.
    """
    from sparse_kvcm.planner import LOCALITIES
    from sparse_kvcm.planner.step_time import Step

    curve = CURVES.get((record["model"], record["trace"]), CURVES.get(("", record["trace"])))
    link = record.get("link_gb_s")
    if curve is None or not link or not record["experts"].startswith("fp8"):
        return None
    model = make_slice(record["model"], record["layers"])
    geometry = model.geometry
    if geometry.compute is None:
        return None
    _, local, _, experts = record["experts"].replace(",", "").split()
    common = (geometry, record["bucket"], record["prompt"], int(experts) // int(local))
    if record["mode"] != "offloaded":
        return Step(*common)
    share = 0.0
    if measured:
        share = 1 - record["hit_rate"]
    elif record["units"] > record["lease_slots"]:
        spread = record["units"] / record["top_k"]
        share = LOCALITIES[curve].miss_share(record["factor"], spread)
    share *= record["batch"] / record["bucket"]  # padding misses nothing
    layout = geometry.unit_layout("fp8")
    rows = tuple(host_row(layout, len(group)).unit_bytes for group in geometry.groups)
    return Step(*common, share * record["top_k"], rows, link)


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
            if other["mode"] == "resident" and all(other[n] == one[n] for n in SIDES)
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
