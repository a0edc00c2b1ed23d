"""fetch, flush, load, convert and layouts on NumPy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from factories import int32
from resolve_oracle import Row
from sparse_kvcm import UnitLayout, ops

LAYOUTS = [[1152], [1024], [656], [576], [512], [352], [288, 36], [256, 32], [576, 8], [4]]
RANGE, HOLE, LEASE, PAGE, UNCOVERED = 1, 2, 8, 16, 32


class Memory:
    """Random arenas and host history of one group, with NumPy views of every unit."""

    def __init__(
        self,
        regions: list[int],
        members: int = 2,
        units_per_page: int = 4,
        pages: int = 3,
        host_pages: int = 5,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layout = UnitLayout(regions, page_alignment=32)
        self.units_per_page = units_per_page
        self.row = ops.host_row(self.layout, members)
        page_bytes = self.layout.page_bytes(units_per_page)
        # Pages at a stride, so that code which takes them as dense fails.
        wide = rng.integers(0, 256, (members, pages, page_bytes + 64), np.uint8)
        self.arenas = [wide[member, :, :page_bytes] for member in range(members)]
        self.host = rng.integers(
            0, 256, (host_pages, units_per_page, self.row.unit_bytes), np.uint8
        )
        self.group = ops.GroupMemory(self.arenas, self.host, self.layout, units_per_page)

    def arena_unit(self, member: int, slot: int) -> list[Any]:
        page, offset = divmod(slot, self.units_per_page)
        regions = []
        for region, size in enumerate(self.layout.region_bytes):
            at = self.layout.region_offset(region, self.units_per_page) + offset * size
            regions.append(self.arenas[member][page, at : at + size])
        return regions

    def host_unit(self, member: int, unit: int) -> list[Any]:
        row = self.host.reshape(-1, self.row.unit_bytes)[unit]
        pieces = {p.region: p for p in self.row.pieces if p.member == member}
        return [row[pieces[r].offset :][: pieces[r].bytes] for r in sorted(pieces)]

    def holds(self, slot: int, unit: int) -> bool:
        return all(
            (a == h).all()
            for member in range(len(self.arenas))
            for a, h in zip(
                self.arena_unit(member, slot), self.host_unit(member, unit), strict=True
            )
        )


@pytest.mark.parametrize("regions", LAYOUTS, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_pieces_of_a_host_row_lie_apart_aligned_and_complete(
    regions: list[int], members: int
) -> None:
    row = ops.host_row(UnitLayout(regions), members)
    covered = sorted(
        byte for piece in row.pieces for byte in range(piece.offset, piece.offset + piece.bytes)
    )
    assert covered == list(range(members * sum(regions)))
    assert row.unit_bytes % 16 == 0
    assert 0 <= row.unit_bytes - len(covered) < 16
    pieces = {(piece.member, piece.region) for piece in row.pieces}
    assert pieces == {(m, r) for m in range(members) for r in range(len(regions))}
    for piece in row.pieces:
        alignment = min(16, piece.bytes & -piece.bytes)
        assert piece.offset % alignment == 0


@pytest.mark.parametrize("regions", LAYOUTS, ids=str)
def test_flush_then_load_moves_units_of_all_members(regions: list[int]) -> None:
    memory = Memory(regions)
    slots, units = int32(11, 0, 5), np.array([3, 19, 8], np.int64)
    ops.flush(slots, units, memory.group)
    assert all(memory.holds(s, u) for s, u in zip(slots, units, strict=True))
    elsewhere = int32(1, 2, 3)
    ops.load(elsewhere, units, [memory.group])
    assert all(memory.holds(s, u) for s, u in zip(elsewhere, units, strict=True))


def test_flush_touches_nothing_but_its_units() -> None:
    memory = Memory([24, 8])
    arenas = [arena.copy() for arena in memory.arenas]
    host = memory.host.copy()
    ops.flush(int32(2), np.array([7], np.int64), memory.group)
    assert all((a == b).all() for a, b in zip(arenas, memory.arenas, strict=True))
    changed = (host.reshape(20, -1) != memory.host.reshape(20, -1)).any(axis=1)
    assert changed.nonzero()[0].tolist() == [7]


def fetch(memory: Memory, misses: list[tuple[int, int]], state: Row, pages: list[int]) -> Any:
    """One row's misses (ordinal, slot); returns its outputs."""
    out = ops.ResolveOutputs.empty(1, 4, 1)
    out.errors[:] = 0
    out.miss_counts[:] = len(misses)
    out.miss_ordinals[0, : len(misses)] = [m[0] for m in misses]
    out.miss_slots[0, : len(misses)] = [m[1] for m in misses]
    ops.fetch(out, int32(0), int32(state), int32(pages), memory.group)
    return out


@pytest.mark.parametrize("regions", LAYOUTS, ids=str)
def test_fetch_copies_each_miss_for_all_members(regions: list[int]) -> None:
    memory = Memory(regions)
    misses = [(0, 3), (5, 7), (9, 0)]
    out = fetch(memory, misses, Row(0, 0, 8, 4, 10, 10, 10, 10), pages=[4, 1, 3])
    assert out.errors.tolist() == [0]
    assert memory.holds(3, 16)
    assert memory.holds(7, 5)
    assert memory.holds(0, 13)


@pytest.mark.parametrize(
    ("miss", "error"),
    [((8, 1), HOLE), ((-1, 1), RANGE), ((1, 12), LEASE), ((1, -1), LEASE), ((4, 1), PAGE)],
)
def test_fetch_skips_a_bad_miss_and_copies_the_others(miss: tuple[int, int], error: int) -> None:
    memory, untouched = Memory([24, 8]), Memory([24, 8])
    out = fetch(memory, [(0, 5), miss], Row(0, 0, 8, 4, 10, 10, 10, 8), pages=[2, -1, 0])
    assert out.errors.tolist() == [error]
    assert memory.holds(5, 8)
    for slot in set(range(12)) - {5}:
        for member in range(2):
            got, kept = memory.arena_unit(member, slot), untouched.arena_unit(member, slot)
            assert all((a == b).all() for a, b in zip(got, kept, strict=True))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("units_per_page", [1, 2, 61, 64])
def test_convert_gives_the_kernels_form_of_every_slot(dtype: Any, units_per_page: int) -> None:
    slots = np.concatenate([np.arange(200), [-1] * 8]).astype(np.int32).reshape(4, -1)
    out = np.full(slots.shape, -77, dtype)
    ops.convert(
        slots,
        out=out,
        units_per_page=units_per_page,
        page_stride=1000,
        unit_stride=7,
        first=5,
        num_slots=200,
    )
    page, offset = np.divmod(slots, units_per_page)
    assert (out == np.where(slots < 0, -1, 5 + page * 1000 + offset * 7)).all()


def test_convert_past_32_bits_needs_an_int64_output() -> None:
    slots, out = int32([5]), np.zeros((1, 1), np.int64)
    ops.convert(slots, out=out, units_per_page=1, page_stride=2**40, unit_stride=1, num_slots=6)
    assert out[0, 0] == 5 * 2**40
    with pytest.raises(ValueError, match="page_stride"):
        ops.convert(
            slots,
            out=np.zeros((1, 1), np.int32),
            units_per_page=1,
            page_stride=2**40,
            unit_stride=1,
            num_slots=6,
        )


def test_convert_reports_slots_outside_and_selected_units_without_one() -> None:
    out, errors = np.zeros((2, 2), np.int32), np.zeros(2, np.uint32)
    state = Row(0, 0, 4, 4, 10, 10, 10, 10)
    ops.convert(
        int32([0, 8], [-1, -1]),
        out=out,
        units_per_page=4,
        page_stride=4,
        unit_stride=1,
        num_slots=8,
        selection=int32([1, 2], [-1, 9]),
        rows=int32(0, 1),
        row_states=int32(state, state),
        errors=errors,
    )
    assert out.tolist() == [[0, -1], [-1, -1]]
    assert errors.tolist()[0] & LEASE
    assert errors.tolist()[1] == UNCOVERED


def test_reset_leases_empties_their_entries_only() -> None:
    entries, last = np.arange(10, dtype=np.uint32), np.zeros(3, np.uint32)
    ops.reset_leases([(1, 2, 3)], [entries], [last], 2**32 - 1)
    assert last.tolist() == [0, 2**32 - 1, 0]
    assert entries.tolist() == [0, 1, *[0xFFFFFFFF] * 3, 5, 6, 7, 8, 9]


def test_launch_of_no_rows_is_a_no_op() -> None:
    out = ops.ResolveOutputs.empty(0, 3, 1)
    ops.resolve(
        np.zeros((0, 3), np.int32),
        np.zeros(0, np.int32),
        np.zeros((0, 8), np.int32),
        np.ones(2, np.int32),
        np.zeros(0, np.int32),
        np.zeros(0, np.int32),
        out=out,
    )


def test_torch_tensors_are_read_and_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)

    def tensor(*values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32)

    selection = tensor([3, -1, 4])
    out = ops.ResolveOutputs.empty(1, 3, 1, like=selection)
    assert isinstance(out.slots, torch.Tensor)
    entries = torch.full((6,), -1, dtype=torch.int32)
    ops.resolve(
        selection,
        tensor(0),
        tensor([0, 0, 4, 2, 5, 5, 4, 4]),
        tensor(1, 1),
        entries,
        tensor(0),
        out=out,
    )
    assert out.slots.tolist() == [[0, -1, 4]]
    assert entries.tolist()[0] == 1 << 25 | 3
    assert ops.decode_entries(entries)[0].ordinal == 3
