"""resolve against the oracle: random programs of steps through `ops` and through a Batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resolve_oracle import HOLE, LEASE, MAX_UNITS, RANGE, STALE, Row
from resolve_program import ResolveProgram

# Steps between two uses of a lease; ages saturate at 127.
JUMPS = [1, 1, 1, 2, 125, 126, 127, 128, 129, 1000, 2**31, 2**32 - 1]
START_CLOCKS = [0, 100, 2**31 - 2, 2**32 - 3]
Shape = tuple[int, int]  # N, W of a lease; N = 0: all window


class Drawn:
    """Choices that hypothesis makes, so that it can shrink a failing program."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def pick(self, options: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))


class Seeded:
    """The same choices from a seed: many more programs in the same time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.integer = self.rng.randint
        self.pick = self.rng.choice


Choices = Drawn | Seeded


def consistent_row(c: Choices, lease_id: int, base: int, shape: Shape, max_new: int) -> Row:
    """Any lengths that agree with each other, whether or not the manager would reach them."""
    cached_slots, window_slots = shape
    committed = c.integer(0, 40)
    if c.integer(0, 99) == 0:  # seldom: such a long row takes long
        committed = MAX_UNITS - c.integer(0, 2)
    if cached_slots == 0:
        committed = min(committed, window_slots)
    begin = 0
    if cached_slots:
        begin = c.integer(max(0, committed - window_slots), committed)
    longest = min(committed + max_new, begin + window_slots, MAX_UNITS)
    length = c.integer(committed, longest)
    watermark = c.pick([committed, begin, c.integer(0, committed)])
    return Row(lease_id, base, cached_slots, window_slots, length, committed, begin, watermark)


def ordinal(c: Choices, state: Row) -> int:
    """Cached ones from a pool small enough to hit; window, hole and bad ones; -1."""
    end = max(1, min(state.watermark, state.window_begin))
    kind = c.integer(0, 11)
    if kind < 6:
        return c.integer(0, min(12, end - 1))
    if kind == 6:
        return c.integer(max(0, end - 3), end - 1)
    if kind == 7:
        return c.integer(0, max(0, state.length - 1))
    if kind == 8 and state.length > state.window_begin:
        return c.integer(state.window_begin, state.length - 1)
    if kind == 9 and state.watermark < state.window_begin:
        return c.integer(state.watermark, state.window_begin - 1)
    if kind == 10:
        return c.pick([-2, -(2**31), state.length, state.length + 1, 2**24, 2**31 - 1])
    return -1


def launched_rows(c: Choices, num_rows: int) -> list[int]:
    """Some rows in some order, with padding and rows that do not exist between them."""
    left, rows = list(range(num_rows)), []
    for _ in range(c.integer(0, num_rows)):
        rows.append(left.pop(c.integer(0, len(left) - 1)))
    for _ in range(c.integer(0, 2)):
        extra = c.pick([-1, -1, -2, num_rows, 2**31 - 1, -(2**31)])
        rows.insert(c.integer(0, len(rows)), extra)
    return rows or [-1]


def run_program(c: Choices) -> None:
    k, max_new = c.integer(1, 6), c.integer(0, 3)
    shapes, bases, num_slots = [], [], 0
    for _ in range(c.integer(1, 4)):
        shapes.append((c.pick([0, k, k, k + 1, 2 * k + 3]), c.integer(1, 6)))
        bases.append(num_slots + c.integer(0, 2))
        num_slots = bases[-1] + sum(shapes[-1])
    num_rows = len(shapes) + c.integer(0, 1)
    program = ResolveProgram(num_slots, len(shapes), num_rows, max_new, c.pick([-1, num_slots]))
    clock = c.pick(START_CLOCKS)
    for lease_id, (base, shape) in enumerate(zip(bases, shapes, strict=True)):
        program.reset(lease_id, base, shape[0], clock)

    for _ in range(c.integer(1, 12)):
        clock = (clock + c.pick(JUMPS)) % 2**32
        for row, (base, shape) in enumerate(zip(bases, shapes, strict=True)):
            action = c.pick(["keep", "keep", "change", "re-lease", "leave"])
            if action == "leave":
                program.row_states[row] = Row()
            elif action != "keep":
                program.row_states[row] = consistent_row(c, row, base, shape, max_new)
            if action == "re-lease":
                program.reset(row, base, shape[0], (clock - 1) % 2**32)
        rows = launched_rows(c, num_rows)
        states = [program.row_states[row] if 0 <= row < num_rows else Row() for row in rows]
        selection = [[ordinal(c, state) for _ in range(k)] for state in states]
        step_open = c.integer(0, 7) > 0
        for _ in range(c.pick([1, 1, 1, 2])):  # the second is a replay without a publish
            program.launch(rows, selection, clock, step_open)


@settings(max_examples=60)
@given(data=st.data())
def test_program_of_steps_matches_the_oracle(data: st.DataObject) -> None:
    run_program(Drawn(data))


@pytest.mark.parametrize("first_seed", range(0, 3000, 500))
def test_many_programs_of_steps_match_the_oracle(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 500):
        print("seed", seed)  # shown if it fails
        run_program(Seeded(seed))


@pytest.mark.parametrize("cached_slots", [64, 65, 192])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_program_matches_the_oracle(seed: int, cached_slots: int) -> None:
    """A drifting selection of 64 over thousands of units, rows launched now and then."""
    print("seed", seed)
    rng = random.Random(seed)
    k, window, num_rows = 64, 16, 3
    lease = cached_slots + window
    program = ResolveProgram(num_rows * lease, num_rows, num_rows, max_new_units=1)
    lengths = [500, 2000, 70]
    clock = 0
    for row in range(num_rows):
        program.reset(row, row * lease, cached_slots, clock)
    favourites = [[rng.randrange(length) for _ in range(k)] for length in lengths]
    for _ in range(150):
        clock += rng.choice([1, 1, 1, 1, 5, 126, 127, 128])
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        selection = []
        for row in rows:
            length = lengths[row] = lengths[row] + 1
            begin = max(0, length - window)
            program.row_states[row] = Row(
                row, row * lease, cached_slots, window, length, length - 1, begin, length - 1
            )
            for _ in range(rng.randint(0, k // 4)):
                favourites[row][rng.randrange(k)] = rng.choice([-1, rng.randrange(length)])
            selection.append(list(favourites[row]))
        program.launch(rows, selection, clock)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_permuting_a_selection_permutes_its_slots_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    k, cached_slots, window = 12, 20, 4
    outcomes = []
    permutation = rng.sample(range(k), k)
    steps = [[rng.choice([-1, rng.randrange(45)]) for _ in range(k)] for _ in range(6)]
    for order in (list(range(k)), permutation):
        program = ResolveProgram(cached_slots + window, 1, 1, max_new_units=1)
        program.row_states[0] = Row(0, 0, cached_slots, window, 40, 39, 36, 36)
        for clock, selected in enumerate(steps, start=1):
            outputs = program.launch([0], [[selected[j] for j in order]], clock)
        slots = [0] * k
        for place, j in enumerate(order):
            slots[j] = int(outputs.slots[0, place])
        count = int(outputs.miss_counts[0])
        outcomes.append(
            (
                slots,
                outputs.miss_ordinals[0, :count].tolist(),
                outputs.miss_slots[0, :count].tolist(),
                int(outputs.hit_counts[0]),
                int(outputs.errors[0]),
                program.entries.tolist(),
                program.last.tolist(),
            )
        )
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("launched_between", [False, True])
@pytest.mark.parametrize("age", [1, 2, 125, 126, 127, 128, 129, 254, 255, 256, 1000])
def test_ages_differ_up_to_127_and_are_equal_beyond(age: int, launched_between: bool) -> None:
    """Slot 0 was used one step after slot 1. Both saturated, the lower slot goes."""
    program = ResolveProgram(3, 1, 1, max_new_units=0)
    program.row_states[0] = Row(0, 0, 2, 1, 10, 10, 10, 10)
    for clock, selection in enumerate([[0, 1], [0, 1], [0, -1]], start=1):
        program.launch([0], [selection], clock)
    if launched_between:
        for between in range(clock + 1, clock + age):
            program.launch([0], [[-1, -1]], between)
    outputs = program.launch([0], [[5, -1]], clock + age)
    assert outputs.slots[0, 0] == (1 if age <= 126 else 0)


def test_repeated_launch_without_publish_is_stale_and_changes_nothing() -> None:
    program = ResolveProgram(8, 1, 1, max_new_units=1)
    program.row_states[0] = Row(0, 0, 6, 2, 10, 9, 8, 8)
    program.launch([0], [[1, 9, 3]], 1)
    before = program.entries.copy()
    outputs = program.launch([0], [[4, 9, 1]], 1)
    assert outputs.errors.tolist() == [STALE]
    assert (program.entries == before).all()


def test_selection_with_free_row_stride_is_read_in_place() -> None:
    from sparse_kvcm import ops

    wide = np.full((2, 9), -7, np.int32)
    wide[:, :3] = [[0, 1, 2], [2, 1, 0]]
    states = np.array([Row(0, 0, 4, 1, 5, 5, 5, 5), Row(1, 5, 4, 1, 5, 5, 5, 5)], np.int32)
    out = ops.ResolveOutputs.empty(2, 3, 1)
    ops.resolve(
        wide[:, :3],
        np.array([0, 1], np.int32),
        states,
        np.array([1, 1], np.int32),
        np.full(10, -1, np.int32),
        np.zeros(2, np.int32),
        out=out,
    )
    assert out.slots.tolist() == [[0, 1, 2], [7, 6, 5]]
    assert out.errors.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("length", "error"), [(MAX_UNITS, 0), (MAX_UNITS + 1, LEASE)], ids=["2**24-1", "2**24"]
)
def test_row_may_have_2_to_the_24_minus_1_units(length: int, error: int) -> None:
    program = ResolveProgram(6, 1, 1, max_new_units=1)
    program.row_states[0] = Row(0, 0, 4, 2, length, length - 1, length - 2, length - 2)
    outputs = program.launch([0], [[length - 3, length - 1, 0]], 1)
    assert outputs.errors.tolist() == [error]
    if not error:
        assert outputs.miss_ordinals[0, :2].tolist() == [0, length - 3]


def test_range_and_hole_are_reported_together_and_spare_the_rest_of_the_row() -> None:
    program = ResolveProgram(6, 1, 1, max_new_units=1)
    program.row_states[0] = Row(0, 0, 4, 2, 10, 9, 8, 5)
    outputs = program.launch([0], [[6, 10, 2, 9]], 1)
    assert outputs.errors.tolist() == [RANGE | HOLE]
    assert outputs.slots[0].tolist() == [-1, -1, 0, 5]


INCONSISTENT = {
    "lease id": {"lease_id": 1},
    "base": {"base": -1},
    "slots past the arena": {"base": 1},
    "slots that overflow 32 bits": {"base": 2**31 - 1},
    "no window": {"window_slots": 0},
    "N below k": {"cached_slots": 3},
    "N above 65,535": {"cached_slots": 65536},
    "N negative": {"cached_slots": -1},
    "window before 0": {"window_begin": -1},
    "window past committed": {"window_begin": 10},
    "window wider than the ring": {"window_begin": 7},
    "committed past the length": {"committed": 11},
    "committed negative": {"committed": -1},
    "too much growth": {"committed": 8},
    "watermark past committed": {"watermark": 10},
    "watermark negative": {"watermark": -1},
    "all window with a begin": {"cached_slots": 0},
    "length negative": {"length": -1},
}


@pytest.mark.parametrize("change", INCONSISTENT.values(), ids=INCONSISTENT)
def test_inconsistent_row_gives_lease_error_and_touches_nothing(change: dict[str, int]) -> None:
    program = ResolveProgram(6, 1, 1, max_new_units=1)
    program.row_states[0] = Row(0, 0, 4, 2, 10, 9, 8, 8)._replace(**change)
    outputs = program.launch([0], [[1, 9, 3, 3]], 1)
    assert outputs.errors.tolist() == [LEASE]
