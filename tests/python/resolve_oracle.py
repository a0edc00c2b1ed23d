"""What resolve must do, in plain Python, from the contract in DESIGN.md 4.3.

Dicts, sets and sorted() say it; speed does not matter. Nothing here is taken from the C++ sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY = 0xFFFFFFFF
RANGE, HOLE, STALE, LEASE = 1, 2, 4, 8
BATCH_ROW = 1
MAX_UNITS = 2**24 - 1


class Row(NamedTuple):
    """One line of row_states."""

    lease_id: int = -1
    base: int = 0
    cached_slots: int = 0
    window_slots: int = 0
    length: int = 0
    committed: int = 0
    window_begin: int = 0
    watermark: int = 0


@dataclass
class Result:
    """Outputs of one launch position."""

    slots: list[int]
    write_slots: list[int]
    misses: list[tuple[int, int]] = field(default_factory=list)  # (ordinal, slot)
    hits: int = 0
    error: int = 0


def pack(clock: int, resident: int, ordinal: int) -> int:
    return (clock % 128) << 25 | resident << 24 | ordinal


@dataclass
class Oracle:
    """Entries and clocks of one selection group."""

    num_slots: int
    num_leases: int
    max_new_units: int
    no_write_slot: int = -1

    def __post_init__(self) -> None:
        self.entries = [EMPTY] * self.num_slots
        self.last = [0] * self.num_leases
        self.row_errors: dict[int, int] = {}
        self.batch_error = 0

    def reset(self, lease_id: int, base: int, cached_slots: int, clock: int) -> None:
        """A new lease: entries empty, last = clock."""
        self.entries[base : base + cached_slots] = [EMPTY] * cached_slots
        self.last[lease_id] = clock

    def launch(
        self,
        rows: list[int],
        row_states: list[Row],
        selection: list[list[int]],
        clock: int,
        step_open: bool,
    ) -> list[Result]:
        results = []
        for row, selected in zip(rows, selection, strict=True):
            result = Result([-1] * len(selected), [self.no_write_slot] * self.max_new_units)
            results.append(result)
            if row == -1:
                continue
            if not 0 <= row < len(row_states) or row_states[row].lease_id < 0:
                self.batch_error |= BATCH_ROW
                continue
            self._resolve(row_states[row], selected, clock, step_open, result)
            if result.error:
                self.row_errors[row] = self.row_errors.get(row, 0) | result.error
        return results

    def _resolve(
        self, state: Row, selected: list[int], clock: int, step_open: bool, result: Result
    ) -> None:
        if not self._consistent(state, len(selected)):
            result.error = LEASE
            return
        if not step_open or self.last[state.lease_id] == clock:
            result.error = STALE
            return
        cached = set()
        for ordinal in selected:
            if ordinal == -1:
                continue
            if not 0 <= ordinal < state.length:
                result.error |= RANGE
            elif ordinal < state.window_begin:
                if ordinal < state.watermark:
                    cached.add(ordinal)
                else:
                    result.error |= HOLE
        places = self._update(state, cached, clock, result)
        for j, ordinal in enumerate(selected):
            if state.window_begin <= ordinal < state.length:
                result.slots[j] = self._ring(state, ordinal)
            else:
                result.slots[j] = places.get(ordinal, -1)
        for j, ordinal in enumerate(range(state.committed, state.length)):
            result.write_slots[j] = self._ring(state, ordinal)

    def _update(self, state: Row, cached: set[int], clock: int, result: Result) -> dict[int, int]:
        """Place the cached ordinals; returns the slot of each."""
        last = self.last[state.lease_id]

        def age(entry: int) -> int:
            return min(127, (last - (entry >> 25)) % 128 + (clock - last) % 2**32)

        def bucket(entry: int) -> int:
            return 255 if entry == EMPTY else 2 * age(entry) + 1 - (entry >> 24 & 1)

        lease = range(state.base, state.base + state.cached_slots)
        held = {
            self.entries[slot] & 0xFFFFFF: slot for slot in lease if self.entries[slot] != EMPTY
        }
        places = {ordinal: held[ordinal] for ordinal in cached if ordinal in held}
        others = [slot for slot in lease if slot not in places.values()]
        missing = sorted(cached - held.keys())
        by_age = sorted(others, key=lambda slot: (-bucket(self.entries[slot]), slot))
        victims = sorted(by_age[: len(missing)])

        for slot in set(others) - set(victims):
            entry = self.entries[slot]
            if entry != EMPTY and age(entry) == 127:
                self.entries[slot] = pack(clock - 127, entry >> 24 & 1, entry & 0xFFFFFF)
        for ordinal, slot in places.items():
            self.entries[slot] = pack(clock, 1, ordinal)
        result.hits = len(places)
        result.misses = list(zip(missing, victims, strict=True))
        for ordinal, slot in result.misses:
            self.entries[slot] = pack(clock, 0, ordinal)
        self.last[state.lease_id] = clock
        return places | dict(result.misses)

    @staticmethod
    def _ring(state: Row, ordinal: int) -> int:
        return state.base + state.cached_slots + ordinal % state.window_slots

    def _consistent(self, state: Row, k: int) -> bool:
        lease = (
            state.lease_id < self.num_leases
            and state.base >= 0
            and state.window_slots >= 1
            and 0 <= state.cached_slots <= 65535
            and state.base + state.cached_slots + state.window_slots <= self.num_slots
            and (k <= state.cached_slots if state.cached_slots else state.window_begin == 0)
        )
        lengths = (
            0 <= state.watermark <= state.committed <= state.length <= MAX_UNITS
            and 0 <= state.window_begin <= state.committed
            and state.length - state.window_begin <= state.window_slots
            and state.length - state.committed <= self.max_new_units
        )
        return lease and lengths
