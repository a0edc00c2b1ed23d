"""Why a fetch within a step may be slower than one in a benchmark of its own.

    python -m benchmarks.decode_slice.fetch_probe --model v4-flash --factor 4 --batch 256

Requests of a slice are seated and select as in a step, without its computing; each group's fetch is
timed with something else just before it:

    again     the same fetch: its rows were read a moment ago, so translations are at hand
    nothing   other fetches, of the groups before it: as in a benchmark that repeats fetches
    l2        256 MiB were written: what the GPU's L2 had, page tables of the host too, is out
    weights   8 GiB were read, as experts are: the GPU's own translations are out as well

If `again` and `nothing` are fast and `weights` is as slow as the whole step, translations bind, and
the GPU looks them up anew in each step. If all are as slow, look for it in the order of the list or
in the size of rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_slice.budget import Budget
from benchmarks.decode_slice.cache import SliceCache
from benchmarks.decode_slice.measure import Inputs, Run
from benchmarks.decode_slice.model import make_slice
from benchmarks.decode_slice.options import check_device, check_factor, check_least
from sparse_kvcm import ResolveOutputs, cuda_is_available
from sparse_kvcm.ops import host_row

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from run_bench import print_table

STEPS = 40  # before those that are timed
TIMED = 4  # of each condition
SPIN = 400_000  # clocks that hide the launches behind them
OUTPUT = STEPS + 4 * TIMED


class Probe:
    """A cache with `n` requests in the middle of decoding."""

    def __init__(self, model_name: str, n: int, prompt: int, factor: float, device: str) -> None:
        self._model = make_slice(model_name)
        most = Budget(self._model, prompt + OUTPUT, factor, device).largest_batch("offloaded")
        self._n = min(n, most)
        self._cache = SliceCache(self._model, "offloaded", self._n, prompt + OUTPUT, factor, device)
        per_unit = self._model.geometry.tokens_per_unit
        self._cache.admit([prompt - number % per_unit for number in range(self._n)])
        run = Run(prompt, OUTPUT - 8, 0, self._model.trace)
        self._selection = Inputs(self._cache, run, self._n).selection
        self._rows = torch.tensor(self._cache.rows, dtype=torch.int32).to(device)
        groups, k = len(self._model.geometry.groups), self._model.geometry.top_k
        self._outs = [ResolveOutputs.empty(self._n, k, 1, like=self._rows) for _ in range(groups)]
        self._step = 0
        self._gpu = device != "cpu"
        self._weights = torch.ones(1 << 33 if self._gpu else 8, dtype=torch.uint8, device=device)

    def run(self) -> list[list[str]]:
        """A row of the table for each condition."""
        for _ in range(STEPS):
            self._decode(lambda group: None, times=[])
        rows = []
        for name, before in self._conditions().items():
            times: list[tuple[int, Any, Any]] = []
            missed = sum(self._decode(before, times) for _ in range(TIMED)) / TIMED
            if self._gpu:
                torch.cuda.synchronize()
            each = [(g, a.elapsed_time(b) if self._gpu else 0.0) for g, a, b in times]
            rows.append([name, *self._figures(each, missed)])
        return rows

    def _conditions(self) -> dict[str, Callable[[int], None]]:
        return {
            "again": self._fetch,
            "nothing": lambda group: None,
            "l2": self._write,
            "weights": self._read_weights,
        }

    def _decode(self, before: Callable[[int], None], times: list[tuple[int, Any, Any]]) -> float:
        """A step; returns units that it missed in a group, on average."""
        self._cache.begin_step()
        for group, out in enumerate(self._outs):
            self._cache.batch.resolve(
                group, self._rows, self._selection[self._step, group], out,
                stream=self._cache.stream,
            )  # fmt: skip
            before(group)
            if self._gpu:
                torch.cuda._sleep(SPIN)
            begin = self._stamp()
            self._fetch(group)
            times.append((group, begin, self._stamp()))
        self._cache.end_step()
        self._step += 1
        return float(sum(int(out.miss_counts.sum()) for out in self._outs)) / len(self._outs)

    def _fetch(self, group: int) -> None:
        self._cache.batch.fetch(
            group, self._rows, self._outs[group], stream=self._cache.stream
        )  # fmt: skip

    def _write(self, group: int) -> None:
        self._weights[: 1 << 28].fill_(1)

    def _read_weights(self, group: int) -> None:
        self._weights.view(torch.int64).max()

    def _stamp(self) -> Any:
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _figures(self, each: list[tuple[int, float]], missed: float) -> list[str]:
        layout = self._model.geometry.unit_layout("fp8")
        groups = self._model.geometry.groups
        row = statistics.mean(host_row(layout, len(group)).unit_bytes for group in groups)
        ms = statistics.median(time for _, time in each)
        rates = (f"{missed * row / ms / 1e6:.1f}", f"{missed / ms / 1e3:.1f}") if ms else ("-", "-")
        return [f"{self._n}", f"{missed / self._n:.1f}", f"{row:.0f}", f"{1000 * ms:.0f}", *rates]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_slice.fetch_probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="v4-flash")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32_768)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        model = make_slice(options.model)
        check_factor(model, options.factor)
        check_least("--batch", options.batch, 1)
        check_least("--prompt", options.prompt, 2 * model.geometry.tokens_per_unit - 1)
        check_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.device != "cpu" and not (cuda_is_available() and torch.cuda.is_available()):
        parser.error("no GPU; --model tiny --device cpu runs without")
    stream = None if options.device == "cpu" else torch.cuda.Stream(options.device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        probe = Probe(options.model, options.batch, options.prompt, options.factor, options.device)
        rows = probe.run()
    columns = ("before", "requests", "misses", "bytes", "us", "GB/s", "10^6 rows/s")
    print_table(columns, rows, f"fetches of {options.model}, median of {TIMED} steps, all groups")


if __name__ == "__main__":
    main()
