"""How long the phases of a step take: marks between them, on a GPU events in the captured graph."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import torch

PHASES = ("flush", "indexer", "resolve", "fetch", "convert", "attention", "experts", "rest")


class Clock:
    """Does nothing."""

    def begin(self) -> None:
        """The step begins."""

    def mark(self, phase: str) -> None:
        """What was launched since the last mark belongs to `phase`."""


class EventClock(Clock):
    """Records an event at each mark; capture it once, read it after each replay.

    Where a phase waits for another stream, its time is what is not hidden.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def begin(self) -> None:
        """See `Clock`."""
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((phase, event))

    def read_ms(self) -> dict[str, float]:
        """Milliseconds by phase of the last replay, which has ended."""
        sums: dict[str, float] = defaultdict(float)
        for (_, begin), (phase, end) in pairwise(self._marks):
            sums[phase] += begin.elapsed_time(end)
        return dict(sums)


class WallClock(Clock):
    """The same by the host's clock, where launches wait."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        """See `Clock`."""
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """See `Clock`."""
        self._marks.append((phase, time.perf_counter()))

    def read_ms(self) -> dict[str, float]:
        """See `EventClock`."""
        sums: dict[str, float] = defaultdict(float)
        for (_, begin), (phase, end) in pairwise(self._marks):
            sums[phase] += 1000 * (end - begin)
        return dict(sums)
