"""Page tables of peers: written, read, and refused when they do not hold together."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kvcm import UnitLayout
from sparse_kvcm.transfer.page_table import (
    MAX_TABLE_BYTES,
    PageFormat,
    PageTable,
    PeerDataError,
    decode_table,
    encode_table,
)
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.transport import Region, all_within
from sparse_kvcm.transfer.wire import PageList
from transfer_cases import ALL_KINDS, HISTORY, Side

TABLE = Side(ALL_KINDS, 8).table
PLAIN = msgspec.to_builtins(TABLE)
HUGE = 1 << 63


def edited(path: str, value: Any, data: bytes = b"") -> bytes:
    """A table with one place changed, e.g. "pool_groups.0.pools.0.num_slots"."""
    table = msgspec.msgpack.decode(data or msgspec.msgpack.encode(PLAIN))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = table
    for part in way:
        place = place[part]
    place[last] = value
    return msgspec.msgpack.encode(table)


def test_a_table_comes_back_as_it_was() -> None:
    assert decode_table(encode_table(TABLE)) == TABLE


def test_a_format_of_a_unit_layout_lies_as_arena_pages_do() -> None:
    layout = UnitLayout([576, 8], page_alignment=576)
    form = PageFormat.of(layout, 64)
    assert [(one.offset, one.unit_bytes) for one in form.regions] == [(0, 576), (36864, 8)]
    assert form.page_bytes == layout.page_bytes(64) == 37440


@pytest.mark.parametrize("field", ["layer_groups", "pool_groups", "formats"])
def test_a_table_without_groups_is_refused(field: str) -> None:
    with pytest.raises(PeerDataError, match="malformed"):
        decode_table(edited(field, []))


def test_a_table_without_pool_views_is_refused() -> None:
    with pytest.raises(PeerDataError, match="malformed"):
        decode_table(edited("layer_groups.0.views", []))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("version", 2, "version must be 1"),
        ("version", "1", "malformed"),
        ("tokens_per_block", 0, "malformed"),
        ("tokens_per_block", 16, "tokens_per_block 16"),
        ("pool_groups.0.pools.0.memory", "HBM", "malformed"),
        ("pool_groups.0.pools.0.memory", 1, "malformed"),
        ("pool_groups.0.pools.0.base_address", 0, "null"),
        ("pool_groups.0.pools.0.base_address", -4096, "malformed"),
        ("pool_groups.0.pools.0.base_address", HUGE - 8, "2\\*\\*63"),
        ("pool_groups.0.pools.0.base_address", 2 * HUGE - 8, "malformed"),
        ("pool_groups.0.pools.0.base_address", 4096.0, "malformed"),
        ("pool_groups.0.pools.0.slot_bytes", 8, "fit 8 bytes"),
        ("pool_groups.0.pools.0.num_slots", 0, "malformed"),
        ("pool_groups.0.pools.0.num_slots", 1 << 31, "malformed"),
        ("pool_groups.0.pools.0.device", -1, "malformed"),
        ("layer_groups.0.pool_group", 5, "pool_group must be in"),
        ("layer_groups.0.views.0.pool", 1, "pool in"),
        ("layer_groups.0.views.0.kind", "strided", "malformed"),
        ("layer_groups.0.views.0.kind", "unit_major", "pieces"),
        ("layer_groups.0.views.0.entries.0.format", 5, "format must be below"),
        ("layer_groups.0.views.0.entries.0.offset", 1 << 40, "ascend"),
        ("layer_groups.0.views.0.entries.2.offset", 1 << 40, "fit"),
        ("layer_groups.0.views.0.entries.1.offset", 0, "ascend"),
        ("layer_groups.0.views.0.entries.1.layers", [0], "once"),
        ("layer_groups.0.views.0.entries.1.layers", [0, 1], "layers must be one"),
        ("layer_groups.0.views.0.entries.1.role", "", "malformed"),
        ("formats.0.rows_per_page", 3, "divide"),
        ("formats.0.units_per_page", 16, "tokens_per_block"),
        ("layer_groups.0.tokens_per_block", 16, "tokens_per_block 16"),
        ("layer_groups.0.tokens_per_block", 0, "malformed"),
        ("layer_groups.2.tokens_per_block", 16, "with a window"),
        ("formats.0.page_bytes", 100, "page_bytes"),
        ("formats.0.regions.1.offset", 8, "overlap"),
        ("formats.0.regions.1.offset", (1 << 48) - 1, "page_bytes"),
        ("formats.0.regions.1.unit_bytes", (1 << 48) - 1, "page_bytes"),
        ("formats.0.regions.0.unit_bytes", 0, "malformed"),
        ("formats.0.surprise", 1, "malformed"),
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(PeerDataError, match=words):
        decode_table(edited(path, value))


def test_a_pool_whose_end_wraps_around_is_refused() -> None:
    table = msgspec.msgpack.decode(edited("pool_groups.0.pools.0.slot_bytes", (1 << 48) - 1))
    table["pool_groups"][0]["pools"][0]["num_slots"] = (1 << 31) - 1  # 2^79 bytes
    with pytest.raises(PeerDataError, match="2\\*\\*63"):
        decode_table(msgspec.msgpack.encode(table))


def test_views_out_of_order_are_refused() -> None:
    views = PLAIN["layer_groups"][0]["views"]
    with pytest.raises(PeerDataError, match="one per"):
        decode_table(edited("layer_groups.0.views", [*views, *views]))


def test_a_table_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(PeerDataError, match="at most"):
        decode_table(bytes(MAX_TABLE_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(PeerDataError, match="malformed"):
        decode_table(b"\x91" * 100_000)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_refused(data: bytes) -> None:
    with pytest.raises(PeerDataError):
        decode_table(data)


def leaves(value: Any, path: str = "") -> list[str]:
    """Paths of all values of a plain table."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return [path]
    inner = [one for key, child in items for one in leaves(child, f"{path}.{key}".strip("."))]
    return [path, *inner] if path else inner


VALUES = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([0, 1, 2, 7, 8, 16, 1 << 31, (1 << 48) - 1, HUGE - 1, HUGE, 2 * HUGE - 1]),
    st.none(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
)


def check_stays_in_its_memory(table: PageTable) -> None:
    """Every range that is made of an accepted table lies in one of its pools."""
    own = Side(ALL_KINDS, 8)
    try:
        projection = Projection(own.table, table)
    except PeerDataError:
        return
    sources = {i: PageList.of(i, 0, np.arange(16)) for i in range(len(own.kinds))}
    for index, group in enumerate(table.layer_groups):
        slots = min(table.pool_groups[group.pool_group].num_slots, 16)
        wanted = PageList.of(index, 0, np.arange(slots)[::-1])
        tokens = min(slots * table.tokens_per_block, 128)
        try:
            found = projection.ranges(sources, [wanted], (0, tokens), tokens)
        except PeerDataError:
            continue
        for ranges in found.values():
            assert all_within(ranges[:, 1], ranges[:, 2], table.regions())


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(leaves(PLAIN)), VALUES), min_size=1, max_size=3))
def test_a_mutated_table_is_refused_or_stays_in_its_memory(edits: list) -> None:
    data = encode_table(TABLE)
    for path, value in edits:
        try:
            data = edited(path, value, data)
        except (KeyError, IndexError, TypeError):  # an earlier edit took the place away
            return
    try:
        table = decode_table(data)
    except PeerDataError:
        return
    check_stays_in_its_memory(table)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_table_with_broken_bytes_is_refused_or_stays_in_its_memory(data: st.DataObject) -> None:
    raw = bytearray(encode_table(TABLE))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        table = decode_table(bytes(raw))
    except PeerDataError:
        return
    check_stays_in_its_memory(table)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), min_size=1, max_size=4),
)
def test_ranges_are_within_one_region_or_refused(regions: list, ranges: list) -> None:
    known = [Region(address, size, "DRAM") for address, size in regions]
    expected = all(
        size > 0 and any(one.address <= a and a + size <= one.address + one.size for one in known)
        for a, size in ranges
    )
    addresses, sizes = np.array(ranges, np.uint64).T
    assert all_within(addresses, sizes, known) == expected


@pytest.mark.parametrize("address", [0, 4095, 8192, 2**63, 2**64 - 1])
@pytest.mark.parametrize("size", [1, 2**63, 2**64 - 1])
def test_ranges_at_the_end_of_64_bits_are_outside(address: int, size: int) -> None:
    regions = [Region(4096, 4096, "DRAM")]
    assert not all_within(np.array([address], np.uint64), np.array([size], np.uint64), regions)


def test_a_layer_group_with_a_window_says_its_first_page() -> None:
    table = Side([HISTORY], 8).table
    assert table.layer_groups[0].first_page(100, 8) == 0
    windowed = msgspec.structs.replace(table.layer_groups[0], window=6)
    assert [windowed.first_page(n, 8) for n in (0, 5, 12, 13, 21)] == [0, 0, 0, 1, 2]
