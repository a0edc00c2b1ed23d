"""Turns the points of a sweep over fetch's rows in flight into its tuning table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("cpp/src/cuda/fetch_tuning.inc")
NO_BOUND = 2**31 - 1


@dataclass(frozen=True)
class Point:
    """One measurement of the sweep: a line of the benchmark program's output."""

    row_bytes: int
    gap_bytes: int  # of history per miss
    run: int  # misses that lie side by side
    in_flight: int
    present: bool  # what the table in the program chooses
    us: float


@dataclass(frozen=True)
class Entry:
    """A row of the table; see FetchTuning in cpp/src/cuda/tuning.hpp."""

    max_row_bytes: int
    in_flight: int


class Case:
    """Points that differ in their rows in flight alone."""

    def __init__(self, points: Iterable[Point]) -> None:
        points = list(points)
        self.row_bytes, self.gap_bytes, self.run = _key(points[0])
        self.us = {point.in_flight: point.us for point in points}
        self.best = min(self.us, key=lambda in_flight: self.us[in_flight])
        self.present = next(point.in_flight for point in points if point.present)

    def loss(self, in_flight: int) -> float:
        """Share of the best time that a choice costs on top."""
        return self.us[in_flight] / self.us[self.best] - 1


def _key(point: Point) -> tuple[int, int, int]:
    return point.row_bytes, point.gap_bytes, point.run


def make_cases(points: Iterable[Point]) -> list[Case]:
    """Sort points into cases, by row bytes, gap and run."""
    ordered = sorted(points, key=_key)
    return [Case(group) for _, group in itertools.groupby(ordered, key=_key)]


def _between(low: int, high: int) -> int:
    """The geometric mean, to 16 bytes."""
    return round(math.sqrt(low * high) / 16) * 16


def make_entry(cases: Sequence[Case], max_row_bytes: int) -> Entry:
    """Choose the rows in flight of one row size: the least sum of losses."""
    shared = set.intersection(*(set(case.us) for case in cases))
    best = min(shared, key=lambda n: (sum(case.loss(n) for case in cases), n))
    return Entry(max_row_bytes, best)


def make_table(cases: Sequence[Case]) -> list[Entry]:
    """Make an entry per row size, up to halfway to the next; neighbours that agree become one."""
    sizes = sorted({case.row_bytes for case in cases})
    bounds = [_between(low, high) for low, high in itertools.pairwise(sizes)] + [NO_BOUND]
    table = [
        make_entry([case for case in cases if case.row_bytes == size], bound)
        for size, bound in zip(sizes, bounds, strict=True)
    ]
    return [list(alike)[-1] for _, alike in itertools.groupby(table, lambda entry: entry.in_flight)]


def file_text(table: Sequence[Entry], about: dict[str, str]) -> str:
    """Write the table as cpp/src/cuda/tuning.hpp includes it."""
    lines = [
        "// Rows of FetchTuning: {max_row_bytes, in_flight}.",
        f"// {about['device']}, {about['date']}, commit {about['commit'] or 'unknown'}.",
        "// Made by: scripts/bench --tune",
    ]
    lines += [f"{{{e.max_row_bytes}, {e.in_flight}}}," for e in table]
    return "\n".join(lines) + "\n"


COLUMNS = ("row B", "gap KiB", "run", "best", "us", "table before", "loss", "table now", "loss")


def comparison(cases: Sequence[Case], table: Sequence[Entry]) -> list[list[str]]:
    """Lay out, per case, the best point and what both tables lose against it."""
    rows = []
    for case in cases:
        now = next(e for e in table if case.row_bytes <= e.max_row_bytes).in_flight
        rows.append(
            [
                str(case.row_bytes),
                f"{case.gap_bytes / 1024:.0f}",
                str(case.run),
                str(case.best),
                f"{case.us[case.best]:.0f}",
                str(case.present),
                f"{case.loss(case.present):.1%}",
                str(now),
                f"{case.loss(now):.1%}",
            ]
        )
    return rows


def tune(
    points: Iterable[Point],
    about: dict[str, str],
    path: Path,
    show: Callable[[Sequence[str], Sequence[Sequence[str]], str], None],
) -> None:
    """Print what the sweep found and write the table."""
    cases = make_cases(points)
    table = make_table(cases)
    show(COLUMNS, comparison(cases, table), f"{about['device']}: rows in flight of fetch")
    path.write_text(file_text(table, about))
    print(f"wrote {path}; build again to use it")
