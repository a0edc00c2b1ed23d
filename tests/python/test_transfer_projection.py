"""Which bytes go where, against a placement unit by unit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kvcm.transfer.copier import HostCopier
from sparse_kvcm.transfer.page_table import PeerDataError, PoolGroup
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.transport import Route, all_within, merged
from sparse_kvcm.transfer.wire import PageList
from transfer_cases import (
    ALL_KINDS,
    COMPRESSED,
    HISTORY,
    INDEX,
    SLIDING,
    STATE,
    Side,
    check_landed,
    project,
)

TYPES = ("VRAM", "DRAM")
INDEX2 = replace(INDEX, role="OTHER")


def move(source: Side, target: Side, tokens: int, span: tuple[int, int] | None = None) -> None:
    source.write("a", source.pages(tokens), tokens)
    for ranges in project(source, target, tokens, span).values():
        HostCopier().start(ranges)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 31, 32, 33, 61])
@pytest.mark.parametrize(("here", "there"), [(8, 8), (8, 16), (16, 8), (8, 24), (24, 16)])
def test_every_unit_lands_with_any_two_page_sizes(here: int, there: int, tokens: int) -> None:
    source, target = Side(ALL_KINDS, here), Side(ALL_KINDS, there)
    move(source, target, tokens)
    check_landed("a", source, target, target.pages(tokens), tokens)


@settings(max_examples=150, deadline=None)
@given(
    here=st.sampled_from([4, 8, 12, 16, 32]),
    there=st.sampled_from([4, 8, 12, 16, 32]),
    tokens=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_slices_that_cover_a_request_land_all_of_it(
    here: int, there: int, tokens: int, cuts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    source, target = (
        Side([replace(kind, gap=4 * int(rng.integers(3))) for kind in ALL_KINDS], size)
        for size in (here, there)
    )
    own = source.pages(tokens, rng.permutation(16).tolist())
    wanted = target.pages(tokens, rng.permutation(16).tolist())
    source.write("a", own, tokens)
    projection = Projection(source.table, target.table)
    ends = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    for span in itertools.pairwise(ends):
        found = projection.ranges({one.layer_group: one for one in own}, wanted, span, tokens)
        for ranges in found.values():
            HostCopier().start(ranges)
    check_landed("a", source, target, wanted, tokens)


def test_a_slice_moves_its_own_units_alone() -> None:
    source, target = Side([HISTORY, COMPRESSED], 8), Side([HISTORY, COMPRESSED], 16)
    move(source, target, 40, span=(10, 23))
    check_landed("a", source, target, target.pages(40), 40, span=(10, 23))


def test_a_window_is_trimmed_to_pages_that_are_read() -> None:
    # 29 tokens, a window of 6: the next query reads from 24 on, which is page 3 of 8 tokens.
    source, target = Side([SLIDING], 8), Side([SLIDING], 8)
    assert source.pages(29)[0].first_page == 3
    ranges = project(source, target, 29)[Route("VRAM", "VRAM")]
    assert ranges[:, 2].sum() == 5 * 32 * 2


def test_a_window_with_unequal_pages_moves_what_both_sides_have() -> None:
    source, target = Side([SLIDING], 8), Side([SLIDING], 32)
    move(source, target, 29)
    assert (source.pages(29)[0].first_page, target.pages(29)[0].first_page) == (3, 0)
    check_landed("a", source, target, target.pages(29), 29)


def test_windows_of_early_slices_are_not_sent_at_all() -> None:
    source, target = Side([SLIDING, STATE], 8), Side([SLIDING, STATE], 8)
    assert project(source, target, 40, span=(0, 32)) == {}


@pytest.mark.parametrize("there", TYPES)
@pytest.mark.parametrize("here", TYPES)
def test_ranges_are_grouped_by_both_memory_types(here: str, there: str) -> None:
    kinds = [replace(HISTORY, memory=here), replace(INDEX, memory="VRAM")]
    wanted = [replace(HISTORY, memory=there), replace(INDEX, memory="VRAM")]
    found = project(Side(kinds, 8), Side(wanted, 16), 30)
    assert set(found) == {Route(here, there), Route("VRAM", "VRAM")}


def test_equal_slots_in_a_row_are_one_range() -> None:
    padded = replace(HISTORY, padding=12)
    source, target = Side([padded], 8), Side([padded], 8)
    (ranges,) = project(source, target, 32).values()
    size = 4 * source.pools[0].shape[1]
    assert ranges.tolist() == [[source.pools[0].ctypes.data, target.pools[0].ctypes.data, size]]


@pytest.mark.parametrize(("here", "there"), [(8, 8), (8, 16), (16, 8), (24, 8)])
def test_a_target_that_knows_the_source_s_table_knows_where_bytes_belong(
    here: int, there: int
) -> None:
    source, target = Side(ALL_KINDS, here, 32), Side(ALL_KINDS, there, 32)
    slots = [5, 3, 9, 8, 1, 12, 0, 2, 20, 21]
    projection = Projection(source.table, target.table)
    for tokens, span in ((61, (0, 61)), (37, (8, 29)), (8, (0, 8))):
        lists = {one.layer_group: one for one in source.pages(tokens, slots)}
        wanted = target.pages(tokens, slots[::-1])
        pieces = projection.pieces(lists, wanted, span, tokens)
        places = projection.places(wanted, span, tokens)
        assert list(pieces) == list(places)
        for route, found in pieces.items():
            for part, place in zip(found, places[route], strict=True):
                assert (part[:, 1:] == place).all()


def test_a_range_never_lies_in_two_pools_that_are_neighbours() -> None:
    sides = [Side((INDEX, INDEX2), 8, num_slots=4) for _ in range(2)]
    for side in sides:
        sizes = [pool.nbytes for pool in side.pools]
        memory = np.full(sum(sizes), 7, np.uint8)
        side.pools = [memory[: sizes[0]], memory[sizes[0] :]]
        groups = []
        for group, pool in zip(side.table.pool_groups, side.pools, strict=True):
            moved = msgspec.structs.replace(group.pools[0], base_address=pool.ctypes.data)
            groups.append(PoolGroup((moved,)))
        side.table = msgspec.structs.replace(side.table, pool_groups=tuple(groups))
    source, target = sides
    lists = {0: PageList.of(0, 0, [3]), 1: PageList.of(1, 0, [0])}
    projection = Projection(source.table, target.table)
    (ranges,) = projection.ranges(lists, lists.values(), (0, 8), 8).values()
    assert len(ranges) == 2
    for number, part in enumerate(ranges):
        regions = [source.table.regions()[number]]
        assert all_within(part[:1], part[2:], regions)


def test_a_range_is_never_a_row() -> None:
    source, target = Side([HISTORY], 8), Side([HISTORY], 16)
    (ranges,) = project(source, target, 64).values()
    assert len(ranges) <= 8 * 3 * 2  # pages x layers x regions
    assert (ranges[:, 2] >= 8 * 8).all()


def test_slots_apart_are_ranges_apart() -> None:
    source, target = Side([HISTORY], 8), Side([HISTORY], 8)
    found = Projection(source.table, target.table).ranges(
        {0: PageList.of(0, 0, [3, 4, 9])}, [PageList.of(0, 0, [3, 4, 5])], (0, 24), 24
    )
    (ranges,) = found.values()
    assert len(ranges) == 2


def test_merging_keeps_ranges_that_are_neighbours_on_one_side_only() -> None:
    ranges = np.array([[200, 40, 10], [100, 20, 10], [110, 30, 10], [120, 50, 5]], np.uint64)
    assert merged([ranges]).tolist() == [[100, 20, 20], [120, 50, 5], [200, 40, 10]]


@pytest.mark.parametrize(
    ("own", "wanted", "words"),
    [
        ([0, 1, -1, 3], [0, 1, 2, 3], "source pages"),
        ([0, 1, 2], [0, 1, 2, 3], "source pages"),
        ([0, 1, 2, 3], [0, 1, 2], "target pages"),
        ([0, 1, 2, 3], [0, -1, 2, 3], "target pages"),
        ([0, 1, 2, 3], [0, 1, 2, 16], "slots of target"),
        ([0, 1, 2, 3], [0, 1, 2, -2], "slots of target"),
        ([0, 1, 2, 2**31 - 1], [0, 1, 2, 3], "slots of source"),
    ],
)
def test_a_page_that_is_not_there_is_refused(own: list, wanted: list, words: str) -> None:
    source, target = Side([HISTORY], 8), Side([HISTORY], 8)
    with pytest.raises(PeerDataError, match=words):
        Projection(source.table, target.table).ranges(
            {0: PageList.of(0, 0, own)}, [PageList.of(0, 0, wanted)], (0, 32), 32
        )


def test_pages_of_the_target_may_not_begin_behind_the_slice() -> None:
    source, target = Side([HISTORY], 8), Side([HISTORY], 8)
    with pytest.raises(PeerDataError, match="target pages"):
        Projection(source.table, target.table).ranges(
            {0: PageList.of(0, 0, [0, 1])}, [PageList.of(0, 1, [1])], (0, 16), 16
        )


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (replace(HISTORY, layers=(0, 7)), "source's table"),
        (replace(HISTORY, role="VALUE"), "source's table"),
        (replace(HISTORY, unit_bytes=(32,)), "units of"),
        (replace(HISTORY, unit_bytes=(8, 24)), "units of"),
        (replace(HISTORY, tokens_per_unit=4), "units of"),
    ],
)
def test_a_buffer_that_the_source_does_not_have_is_refused(wanted, words: str) -> None:
    with pytest.raises(PeerDataError, match=words):
        Projection(Side([HISTORY], 8).table, Side([wanted], 8).table)


@pytest.mark.parametrize("window", [None, 7])
def test_a_target_that_reads_more_than_the_source_keeps_is_refused(window) -> None:
    with pytest.raises(PeerDataError, match="window"):
        Projection(Side([SLIDING], 8).table, Side([replace(SLIDING, window=window)], 8).table)


def test_a_source_may_have_more_layers_and_groups_than_the_target_asks_for() -> None:
    source, target = Side(ALL_KINDS, 8), Side([replace(HISTORY, layers=(1,))], 8)
    source.write("a", source.pages(20), 20)
    (ranges,) = project(source, target, 20).values()
    HostCopier().start(ranges)
    check_landed("a", source, target, target.pages(20), 20)
