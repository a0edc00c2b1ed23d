"""One point of a sweep: a batch of requests decodes, and what its steps took."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.decode_slice.cache import SliceCache
from benchmarks.decode_slice.clock import Clock, EventClock, WallClock
from benchmarks.decode_slice.forward import Forward, Overlap
from benchmarks.decode_slice.weights import Weights
from benchmarks.traces import PRESETS, DriftTraces
from sparse_kvcm.ops import host_row

EAGER_STEPS = 2  # kernels are compiled in them
PHASE_STEPS = 8


@dataclass(frozen=True)
class Run:
    """How a point is measured.

    Attributes
    ----------
    prompt : int
        Tokens; DeepSeek-V4's requests have up to 3 fewer, so that their entries end in turn.
    warm_up, steps : int
        Steps before, and those that are timed.
    trace : str
        A preset of `benchmarks.traces`.
    overlap : str
        Of `forward.OVERLAPS`.
    seed : int
    """

    prompt: int
    warm_up: int = 32
    steps: int = 48
    trace: str = "glm51"
    overlap: Overlap = "none"
    seed: int = 0

    @property
    def total_steps(self) -> int:
        """All that a request decodes."""
        return self.warm_up + self.steps + PHASE_STEPS


def bucket_of(n: int, most: int) -> int:
    """Rows of the graph that runs n requests: as `sparse_kvcm.decode_worker.batch_buckets`."""
    bucket = 1
    while bucket < n:
        bucket += max(8, (1 << (bucket.bit_length() - 1)) // 8) if bucket >= 8 else bucket
    return min(bucket, most)


class Inputs:
    """What steps are fed with, on the device: tokens, lengths and selections of all steps."""

    def __init__(self, cache: SliceCache, run: Run, bucket: int) -> None:
        model, device, n = cache.model, cache.device, len(cache.rows)
        groups, k = len(model.geometry.groups), model.geometry.top_k
        per_unit, total = model.geometry.tokens_per_unit, run.total_steps
        begin = torch.tensor(cache.tokens, dtype=torch.int32)
        steps = torch.arange(1, total + 1, dtype=torch.int32)
        tokens = torch.zeros((total, bucket), dtype=torch.int32)
        tokens[:, :n] = begin + steps[:, None]
        self.tokens = tokens.to(device)
        random = torch.Generator().manual_seed(run.seed)
        ids = torch.randint(Weights.vocabulary, (total, bucket), generator=random)
        self.ids = ids.to(device)
        self.selection = torch.full(
            (total, groups, bucket, k), -1, dtype=torch.int32, device=device
        )
        traces = DriftTraces(
            PRESETS[run.trace], groups * n, cache.sizes.max_units, k, run.seed, device
        )
        for step in range(total):
            lengths = (self.tokens[step, :n] // per_unit).long().repeat(groups)
            self.selection[step, :, :n] = traces.step(lengths).view(groups, n, k)

    def feed(self, forward: Forward, step: int) -> None:
        """Give a step's inputs to the forward."""
        forward.tokens.copy_(self.tokens[step])
        forward.ids.copy_(self.ids[step])
        forward.selection.copy_(self.selection[step])


class Point:
    """A batch that decodes, step by step.

    Parameters
    ----------
    cache : SliceCache
        Without requests.
    weights : Weights
    n : int
        Requests.
    run : Run
    """

    def __init__(self, cache: SliceCache, weights: Weights, n: int, run: Run) -> None:
        self._cache, self._run, self._n = cache, run, n
        self._gpu = cache.device != "cpu"
        self.seconds: dict[str, float] = {}  # of what is not measured
        self._since = time.perf_counter()
        per_unit = cache.model.geometry.tokens_per_unit
        cache.admit([run.prompt - number % per_unit for number in range(n)])
        self._took("admit")
        self.bucket = bucket_of(n, cache.max_rows)
        self.forward = Forward(cache, weights, self.bucket, run.overlap)
        self.forward.rows[:n] = torch.tensor(cache.rows, dtype=torch.int32).to(cache.device)
        self.inputs = Inputs(cache, run, self.bucket)
        self._step, self._publish_ms = 0, 0.0
        self._took("inputs")

    def step(self, launch: Callable[[], object], opened: Callable[[], object] | None = None) -> int:
        """Decode a token of each request; `opened` is called between publish and `launch`."""
        self.inputs.feed(self.forward, self._step)
        begin = time.perf_counter()
        self._cache.begin_step()
        self._publish_ms = 1000 * (time.perf_counter() - begin)
        if opened is not None:
            opened()
        launch()
        self._cache.end_step()
        self._step += 1
        return self._step - 1

    def capture(self, clock: Clock) -> Callable[[], object]:
        """The forward as a graph, or itself on a CPU."""
        if not self._gpu:
            return lambda: self.forward.run(clock)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward.run(clock)
        return graph.replay

    def measure(self) -> dict[str, Any]:
        """Warm up, time steps, then time their phases."""
        run = self._run
        for _ in range(EAGER_STEPS):
            self.step(lambda: self.forward.run(Clock()))
        self._took("compile")
        launch = self.capture(Clock())
        for _ in range(run.warm_up - EAGER_STEPS):
            self.step(launch)
        before = self._missed()
        first = self._step
        times = self._time(launch)
        missed = (self._missed() - before) / run.steps
        chosen = self.inputs.selection[first : self._step]
        selected = float((chosen >= 0).sum()) / run.steps
        phases = self._phases()
        phases["flush"] = times.pop("flush_ms")
        self._cache.check()
        self._took("steps")
        moved = float((missed * self._row_bytes()).sum())
        record = {
            "batch": self._n,
            "bucket": self.bucket,
            "tokens_per_s": 1000 * self._n / times["step_ms"],
            **times,
            "phases_ms": phases,
            "misses_per_step": float(missed.sum()),
            "hit_rate": 1 - float(missed.sum()) / max(selected, 1),
            "fetch_bytes_per_step": moved,
            "seconds": self.seconds,
        }
        if moved and phases.get("fetch") and self._run.overlap == "none":  # else a part is timed
            record["fetch_gb_s"] = moved / phases["fetch"] / 1e6
        return record

    def _time(self, launch: Callable[[], object]) -> dict[str, float]:
        """Median and 99th percentile between ends of steps; the flush; the host's part."""
        steps = self._run.steps
        host: list[float] = []
        publish: list[float] = []
        ends, opened = [_stamp(self._gpu)], []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step(launch, lambda: opened.append(_stamp(self._gpu)))
            ends.append(_stamp(self._gpu))
            host.append(1000 * (time.perf_counter() - begin))
            publish.append(self._publish_ms)
        if self._gpu:
            torch.cuda.synchronize()
        each = [_ms_between(a, b) for a, b in pairwise(ends)]
        flushes = [_ms_between(a, b) for a, b in zip(ends, opened, strict=False)]
        return {
            "step_ms": statistics.median(each),
            "step_ms_p99": sorted(each)[min(len(each) - 1, int(0.99 * len(each)))],
            "host_ms": statistics.median(host),
            "publish_host_ms": statistics.median(publish),
            "flush_ms": statistics.median(flushes),
        }

    def _phases(self) -> dict[str, float]:
        """Mean milliseconds of each phase, by a second capture that records events."""
        clock = EventClock() if self._gpu else WallClock()
        launch = self.capture(clock)
        sums: dict[str, float] = defaultdict(float)
        for _ in range(PHASE_STEPS):
            self.step(launch)
            if self._gpu:
                torch.cuda.synchronize()
            for phase, ms in clock.read_ms().items():
                sums[phase] += ms / PHASE_STEPS
        return dict(sums)

    def _took(self, what: str) -> None:
        if self._gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[what] = now - self._since
        self._since = now

    def _missed(self) -> torch.Tensor:
        """Units by group so far, float64 ``[groups]``."""
        return self.forward.misses.sum(1).double().cpu()

    def _row_bytes(self) -> torch.Tensor:
        """Bytes of a miss by group."""
        geometry = self._cache.model.geometry
        layout = geometry.unit_layout("fp8")
        rows = [host_row(layout, len(group)).unit_bytes for group in geometry.groups]
        return torch.tensor(rows, dtype=torch.float64)


def run_point(cache: SliceCache, weights: Weights, n: int, run: Run) -> dict[str, Any]:
    """Measure `n` requests that come, decode and go.

    Returns
    -------
    dict
        Milliseconds are of a step of the slice; bytes and units of a step and all its rows.
    """
    try:
        return Point(cache, weights, n, run).measure()
    finally:
        cache.release()


def attention_outputs(
    cache: SliceCache, weights: Weights, n: int, run: Run, steps: int
) -> list[list[torch.Tensor]]:
    """Attention outputs by step and layer; the first `n` rows are requests, others padding.

    On a GPU all but the first steps are replays of one graph.
    """
    kept = []
    replay = None
    try:
        point = Point(cache, weights, n, run)
        for step in range(steps):
            if replay is None:
                point.forward.kept = [[] for _ in range(cache.model.layers)]
            if cache.device != "cpu" and step == EAGER_STEPS:
                replay = point.capture(Clock())
            point.step(replay or (lambda: point.forward.run(Clock())))
            kept.append([torch.cat(parts) for parts in point.forward.kept])
        cache.check()
    finally:
        cache.release()
    return kept


def link_gb_s(device: str, size: int = 1 << 30) -> float:
    """What a copy of pinned memory to the device reaches, the best of five."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, size / begin.elapsed_time(end) / 1e6)
    return best


def _stamp(gpu: bool) -> torch.cuda.Event | float:
    """Now, on the GPU in the order of its work."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(begin: Any, end: Any) -> float:
    return 1000 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)
