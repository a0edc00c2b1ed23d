"""Times attention over arenas and pools, and the rows that it reads, on a GPU.

    mla/CASE/arena      a lease per request, 4,160 slots of DSA or 2,112 of DeepSeek-V4
    mla/CASE/resident   the same selections out of whole histories, whose pages lie anywhere
    mla/CASE/ratio      the second's time by the first's
    rows/CASE           slots to rows, and windows beside them

Launches run in a graph that goes through several selections, so that what a launch reads is not in
L2. Both placements are measured in turns; figures are medians. GB/s are of bytes of selected units;
the limit is a copy on the device, bytes read and written, in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from run_bench import COLUMNS, cell, check_writable, commit, device_name, print_table

from sparse_kvcm.attention import (
    RecordLayout,
    RowForm,
    WindowRows,
    dsa_layout,
    sparse_arena_rows,
    v4_layout,
)
from sparse_kvcm.attention.mla_tuning import Tuning, tuning_of
from sparse_kvcm.attention.sparse_mla import KeyPart, sparse_mla_decode, workspace_bytes
from sparse_kvcm.deepseek_v4.codecs import encode_entries
from sparse_kvcm.dsa.codecs import encode_latents
from sparse_kvcm.models import KvDtype, load_geometry, window_dtype

DEVICE = "cuda"
PAGE = 64  # units
REPEATS = 30
COLD_BYTES = 200e6  # that launches of a graph read before one comes again: four times an H200's L2
RATIO_GOAL = 0.97
DSA_SLOTS, V4_SLOTS, V4_WINDOW = 4096 + PAGE, 2048 + PAGE, 128
DSA_UNITS, V4_UNITS = 32_896, 8_224  # histories of 32K tokens


@dataclass(frozen=True)
class Case:
    """One shape of attention."""

    model: str
    kv_dtype: KvDtype
    b: int
    heads: int
    k: int

    @property
    def is_v4(self) -> bool:
        """Whether a window is read beside the selection."""
        return self.model.startswith("deepseek-v4")

    @property
    def layout(self) -> RecordLayout:
        """Of the selected units."""
        geometry: Any = load_geometry(self.model)
        return (v4_layout if self.is_v4 else dsa_layout)(geometry, self.kv_dtype, PAGE)

    @property
    def window(self) -> RecordLayout | None:
        """Of the window."""
        geometry: Any = load_geometry(self.model)
        return v4_layout(geometry, window_dtype(self.kv_dtype), PAGE) if self.is_v4 else None

    @property
    def bytes(self) -> int:
        """Of units that one launch reads."""
        read = self.k * sum(self.layout.page.layout.region_bytes)
        if self.window is not None:
            read += V4_WINDOW * sum(self.window.page.layout.region_bytes)
        return self.b * read


GLM, V32, FLASH = "glm-5.2", "deepseek-v3.2", "deepseek-v4-flash"
CASES = {
    "glm_fp8": Case(GLM, "fp8", 151, 64, 2048),
    "glm_fp8_b1": Case(GLM, "fp8", 1, 64, 2048),
    "glm_fp8_b32": Case(GLM, "fp8", 32, 64, 2048),
    "glm_bf16": Case(GLM, "bf16", 151, 64, 2048),
    "glm_656": Case(GLM, "fp8_ds_mla", 151, 64, 2048),
    "glm_nvfp4": Case(GLM, "nvfp4", 151, 64, 2048),
    "glm_352": Case(GLM, "nvfp4_ds_mla", 151, 64, 2048),
    "glm_fp8_h16": Case(GLM, "fp8", 151, 16, 2048),
    "v32_656": Case(V32, "fp8_ds_mla", 64, 128, 2048),
    "v4": Case(FLASH, "fp8_ds_mla", 256, 64, 512),
    "v4_b1": Case(FLASH, "fp8_ds_mla", 1, 64, 512),
    "v4_b1500": Case(FLASH, "fp8_ds_mla", 1500, 64, 512),
    "v4_bf16": Case(FLASH, "bf16", 256, 64, 512),
    "v4_fp8": Case(FLASH, "fp8", 256, 64, 512),
    "v4_nvfp4": Case(FLASH, "nvfp4", 256, 64, 512),
}
ROWS = {"glm": (151, 2048, False, 6.0), "v4": (1500, 512, True, 8.0)}


def pages_of(layout: RecordLayout, pages: int) -> torch.Tensor:
    """Pages of units, of which 16 differ."""
    elements = torch.randn(16 * PAGE, layout.width, device=DEVICE)
    if layout.width == layout.value_width:
        record = encode_entries(elements, layout.kv_dtype, rope=layout.rope)
    else:
        record = encode_latents(elements, layout.kv_dtype, rank=layout.value_width)
    few = torch.zeros(16, layout.page.page_bytes, dtype=torch.uint8, device=DEVICE)
    for (begin, size), codes in zip(layout.page.regions, record, strict=True):
        few[:, begin : begin + PAGE * size] = codes.view(16, PAGE * size)
    return few.repeat(math.ceil(pages / 16), 1)[:pages]


class Placement:
    """Requests with so many units each, and `sets` selections of a batch out of them."""

    def __init__(
        self, case: Case, layout: RecordLayout, k: int, units: int, sets: int, *, scatter: bool
    ) -> None:
        requests = max(case.b, min(case.b * sets, 160))
        per_request = math.ceil(units / PAGE)
        self.layout = layout
        self.pages = pages_of(layout, requests * per_request)
        table = torch.arange(requests * per_request, device=DEVICE)
        if scatter:
            table = table[torch.randperm(len(table), device=DEVICE)]
        table = table.view(requests, per_request)
        self.rows = []
        for number in range(sets):
            chosen = torch.stack([torch.randperm(units, device=DEVICE)[:k] for _ in range(case.b)])
            seats = (torch.arange(case.b, device=DEVICE) + number * case.b) % requests
            pages = table[seats].gather(1, chosen // PAGE)
            self.rows.append((pages * PAGE + chosen % PAGE).to(torch.int32))


class Launches:
    """A graph of one launch per selection."""

    def __init__(
        self, case: Case, placement: Placement, window: Placement | None, tuning: Tuning
    ) -> None:
        layout, sets = placement.layout, len(placement.rows)
        shape = (case.b, case.heads, layout.value_width)
        q = torch.randn(case.b, case.heads, layout.width, device=DEVICE).to(torch.bfloat16)
        sinks = torch.zeros(case.heads, device=DEVICE) if case.is_v4 else None
        seen = V4_WINDOW if case.is_v4 else None
        size = workspace_bytes(case.b, case.heads, layout, case.k, seen, tuning)
        buffers = {
            "out": torch.empty(shape, dtype=torch.bfloat16, device=DEVICE),
            "lse": torch.empty(shape[:2], device=DEVICE),
            "workspace": torch.empty(size, dtype=torch.uint8, device=DEVICE),
        }

        def launch(number: int) -> None:
            part = None
            if window is not None:
                part = KeyPart(window.pages, window.rows[number], window.layout)
            sparse_mla_decode(
                q, placement.pages, placement.rows[number], layout=layout, window=part,
                softmax_scale=layout.width**-0.5, sinks=sinks, tuning=tuning, **buffers,
            )  # fmt: skip

        self.sets = sets
        self.kept = q, sinks, buffers  # a graph owns nothing, and captures free memory
        self.graph = graph_of(lambda: [launch(number) for number in range(sets)])

    def us(self) -> float:
        """Time of one launch, in one replay."""
        return replay_us(self.graph) / self.sets


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture, after a run that compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Time of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def copy_gb_per_s() -> float:
    """What the device copies, read and written bytes."""
    source = torch.zeros(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    graph = graph_of(lambda: target.copy_(source))
    us = statistics.median(replay_us(graph) for _ in range(10))
    return float(2 * source.numel() / us / 1e3)


def places_of(case: Case) -> tuple[Placement, Placement, Placement | None]:
    """Arena, resident pool, window."""
    sets = max(1, min(64, math.ceil(COLD_BYTES / case.bytes)))
    slots, units = (V4_SLOTS, V4_UNITS) if case.is_v4 else (DSA_SLOTS, DSA_UNITS)
    arena = Placement(case, case.layout, case.k, slots, sets, scatter=False)
    resident = Placement(case, case.layout, case.k, units, sets, scatter=True)
    window = None
    if case.window is not None:
        window = Placement(case, case.window, V4_WINDOW, V4_WINDOW + PAGE, sets, scatter=True)
    return arena, resident, window


def measure(name: str, limit: float) -> list[dict[str, object]]:
    """Both placements of a case, in turns."""
    case = CASES[name]
    tuning = tuning_of(case.heads, case.layout.name)
    arena, resident, window = places_of(case)
    runs = [Launches(case, place, window, tuning) for place in (arena, resident)]
    times = [[run.us() for run in runs] for _ in range(REPEATS)]
    us = [statistics.median(column) for column in zip(*times, strict=True)]
    records = [
        record("mla", f"{name}/{place}", case.bytes / one / 1e3, "GB/s", limit)
        | {"us": one, "bytes": case.bytes}
        for place, one in zip(("arena", "resident"), us, strict=True)
    ]
    return [*records, record("mla", f"{name}/ratio", us[1] / us[0], "x", RATIO_GOAL)]


def measure_rows(name: str) -> list[dict[str, object]]:
    """Slots to rows."""
    b, k, has_window, goal = ROWS[name]
    pages = b * (V4_SLOTS if has_window else DSA_SLOTS) // PAGE
    sets = max(1, math.ceil(COLD_BYTES / (8 * b * k)))
    slots = [
        torch.randint(0, pages * PAGE, (b, k), dtype=torch.int32, device=DEVICE)
        for _ in range(sets)
    ]
    window = None
    if has_window:
        table = torch.arange(b * 64, dtype=torch.int32, device=DEVICE).view(b, 64)
        lengths = torch.full((b,), 8000, dtype=torch.int32, device=DEVICE)
        window = WindowRows(table, lengths, V4_WINDOW, 128, b * 64)
    out = torch.empty(b, k + (V4_WINDOW if window else 0), dtype=torch.int32, device=DEVICE)
    form = RowForm(PAGE, pages * PAGE)
    graph = graph_of(lambda: [sparse_arena_rows(s, form, window=window, out=out) for s in slots])
    us = statistics.median(replay_us(graph) for _ in range(REPEATS)) / sets
    return [record("rows", name, us, "us", goal)]


def tune(name: str) -> list[dict[str, object]]:
    """The arena of a case under many constants, fastest first; what does not fit is left out."""
    case = CASES[name]
    present = tuning_of(case.heads, case.layout.name)
    arena, _, window = places_of(case)
    found: list[dict[str, object]] = []
    sweep = itertools.product((16, 32, 64, 128), (4, 8), (2, 3, 4, 5, 6), (132, 264))
    for block, warps, stages, programs in sweep:
        tuning = Tuning(block, warps, stages, programs)
        try:
            run = Launches(case, arena, window, tuning)
        except Exception as error:  # Triton's errors of resources have no common base
            print(f"{name} {tuning}: {type(error).__name__}", file=sys.stderr)
            continue
        us = statistics.median(run.us() for _ in range(REPEATS // 3))
        label = f"{name}/n{block}_w{warps}_s{stages}_p{programs}"
        label += " (present)" if tuning == present else ""
        found.append(record("mla_tune", label, us, "us", None))
    return sorted(found, key=lambda one: float(str(one["value"])))


def record(
    bench: str, case: str, value: float, unit: str, limit: float | None
) -> dict[str, object]:
    """One figure, in the form of `scripts/bench`."""
    share = None if limit is None else value / limit
    values = (bench, case, value, unit, limit, share)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> int:
    """Measure, print and write."""
    names = [f"mla/{one}" for one in CASES] + [f"rows/{one}" for one in ROWS]
    parser = argparse.ArgumentParser(prog="scripts/bench_attention", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as mla/glm_fp8, rows, mla")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the records")
    parser.add_argument("--list", action="store_true", help="show the names and run nothing")
    parser.add_argument("--batch", type=int, help="requests instead of each case's own")
    parser.add_argument("--tune", action="store_true", help="sweep the constants of mla cases")
    arguments = parser.parse_intermixed_args()
    unknown = [one for one in arguments.names if not any(n.startswith(one) for n in names)]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]}; --list shows what there is")
    wanted = [
        one
        for one in names
        if not arguments.names
        or any(one == name or one.startswith(f"{name}/") for name in arguments.names)
    ]
    if arguments.list:
        print("\n".join(wanted))
        return 0
    if not torch.cuda.is_available():
        parser.error("these benchmarks need a GPU")
    if arguments.json:
        check_writable(arguments.json)
    if arguments.batch:
        CASES.update({name: replace(one, b=arguments.batch) for name, one in CASES.items()})
    torch.manual_seed(0)
    limit = copy_gb_per_s()
    records = [record("copy", "device_2GiB", limit, "GB/s", None)]
    for bench, name in track(
        [one.split("/") for one in wanted], "cases", console=Console(stderr=True)
    ):
        if bench == "mla":
            records += tune(name) if arguments.tune else measure(name, limit)
        elif not arguments.tune:
            records += measure_rows(name)
        torch.cuda.empty_cache()
    about = {
        "device": device_name(DEVICE),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    print_table(COLUMNS, [[cell(one[c]) for c in COLUMNS] for one in records], about["device"])
    if arguments.json:
        lines = [one | about for one in records]
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
