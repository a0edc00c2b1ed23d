"""Slot mappings and the scatter op against formulas written out token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from sparse_kvcm.adapter import scatter as ops  # noqa: E402
from sparse_kvcm.adapter import slot_mapping as maps  # noqa: E402

INT64 = torch.int64


def page_of(regions: list[int], tokens: int) -> maps.PageGeometry:
    return maps.PageGeometry(kvcm.UnitLayout(regions), tokens)


def expected(table: Any, row: int, position: int, regions: list[int], tokens: int) -> list[int]:
    """The offsets of one token: page begin, then regions, then tokens."""
    page = table[row][position // tokens] if position // tokens < len(table[row]) else -1
    if page < 0:
        return [-1] * len(regions)
    begin, offsets = int(page) * sum(regions) * tokens, []
    for size in regions:
        offsets.append(begin + position % tokens * size)
        begin += size * tokens
    return offsets


LAYOUTS = st.sampled_from([[128, 4], [64, 4], [576], [656], [288, 36], [1152], [256]])


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    """Page tables of requests whose pages are anywhere in a pool, some missing."""
    tokens = draw(st.sampled_from([1, 2, 61, 64]))
    lengths = draw(
        st.lists(
            st.sampled_from([0, 1, tokens - 1, tokens, tokens + 1, 3 * tokens]),
            min_size=1,
            max_size=5,
        )
    )
    pages = max(-(-n // tokens) for n in lengths) + draw(st.integers(0, 2))
    count = max(1, len(lengths) * pages)
    ids = draw(st.permutations(range(count)))
    table = np.array(ids[: len(lengths) * pages], np.int32).reshape(len(lengths), pages)
    for row, n in enumerate(lengths):
        table[row, -(-n // tokens) :] = -1
    missing = draw(st.lists(st.integers(0, max(0, table.size - 1)), max_size=2))
    for index in missing:
        if table.size:
            table.ravel()[index] = -1
    return {
        "tokens": tokens,
        "regions": draw(LAYOUTS),
        "lengths": lengths,
        "history": [draw(st.integers(0, n)) for n in lengths],
        "table": table,
        "pages": count,
        "seed": draw(st.integers(0, 999)),
    }


@given(scenes())
def test_new_tokens_lie_where_the_formula_says(scene: dict[str, Any]) -> None:
    page = page_of(scene["regions"], scene["tokens"])
    new = [n - h for n, h in zip(scene["lengths"], scene["history"], strict=True)]
    got = maps.map_new_tokens(
        torch.from_numpy(scene["table"]), torch.tensor(scene["history"]), torch.tensor(new), page
    )
    wanted = [
        expected(scene["table"], row, position, scene["regions"], scene["tokens"])
        for row, (begin, end) in enumerate(zip(scene["history"], scene["lengths"], strict=True))
        for position in range(begin, end)
    ]
    for region, offsets in enumerate(got.regions):
        assert offsets.dtype == INT64
        assert offsets.tolist() == [token[region] for token in wanted]


@given(scenes())
def test_full_kv_maps_context_and_new_tokens_request_by_request(scene: dict[str, Any]) -> None:
    page = page_of(scene["regions"], scene["tokens"])
    got, starts = maps.map_full_kv(
        torch.from_numpy(scene["table"]), torch.tensor(scene["lengths"]), page
    )
    assert starts.tolist() == [sum(scene["lengths"][:i]) for i in range(len(scene["lengths"]) + 1)]
    wanted = [
        expected(scene["table"], row, position, scene["regions"], scene["tokens"])
        for row, n in enumerate(scene["lengths"])
        for position in range(n)
    ]
    for region, offsets in enumerate(got.regions):
        assert offsets.tolist() == [token[region] for token in wanted]


@given(scenes(), st.sampled_from([0, 4, 36]), st.integers(1, 3))
def test_scatter_writes_page_strided_pools_and_nothing_else(
    scene: dict[str, Any], before: int, others: int
) -> None:
    """The buffer's pages lie in slots that hold other buffers of its size, at some offset."""
    regions, tokens = scene["regions"], scene["tokens"]
    page = page_of(regions, tokens)
    rng = np.random.default_rng(scene["seed"])
    memory = rng.integers(0, 256, (scene["pages"], before + page.page_bytes * others), np.uint8)
    pool = torch.from_numpy(memory)[:, before : before + page.page_bytes]
    mapping, _ = maps.map_full_kv(
        torch.from_numpy(scene["table"]), torch.tensor(scene["lengths"]), page
    )
    n = len(mapping.data)
    record = tuple(torch.from_numpy(rng.integers(0, 256, (n, size), np.uint8)) for size in regions)
    wanted = memory.copy()
    for region, offsets in enumerate(mapping.regions):
        for token, offset in enumerate(offsets.tolist()):
            if offset >= 0:
                at, byte = divmod(offset, page.page_bytes)
                wanted[at, before + byte : before + byte + regions[region]] = record[region][token]
    ops.scatter(pool.view(scene["pages"], tokens, 1, page.page_bytes // tokens), mapping, record)
    np.testing.assert_array_equal(memory, wanted)

    back = ops.gather(pool, mapping)
    for region, offsets in enumerate(mapping.regions):
        kept = record[region].masked_fill((offsets < 0)[:, None], 0)
        assert torch.equal(back[region], kept)


def test_padding_and_positions_without_a_page_have_no_place() -> None:
    table = torch.tensor([[7, -1]], dtype=torch.int32)
    rows, positions = torch.tensor([0, -1, 0, 0, 0]), torch.tensor([3, 3, 4, 8, -1])
    got = maps.map_tokens(table, rows, positions, page_of([8, 4], 4))
    assert got.data.tolist() == [7 * 48 + 24, -1, -1, -1, -1]
    assert got.scale is not None
    assert got.scale.tolist() == [7 * 48 + 32 + 12, -1, -1, -1, -1]


def test_offsets_go_beyond_32_bits() -> None:
    page = page_of([128, 4], 64)
    last = (1 << 31) // page.page_bytes * 3
    got = maps.map_tokens(
        torch.tensor([[last]], dtype=torch.int32), torch.tensor([0]), torch.tensor([63]), page
    )
    assert got.data.tolist() == [last * 8448 + 63 * 128]
    assert got.scale is not None
    assert got.scale.tolist() == [last * 8448 + 64 * 128 + 63 * 4]
    assert last * 8448 > 1 << 32


def test_slots_of_an_arena_are_mapped_by_the_same_formula() -> None:
    got = maps.map_slots(torch.tensor([0, 5, -1], dtype=torch.int32), page_of([8, 4], 4))
    assert got.data.tolist() == [0, 48 + 8, -1]


def test_shared_page_indices_are_those_of_the_converter() -> None:
    converter = kvcm.PageIndexConverter(scale=21, mode=kvcm.PageIndexMode.SHARED)
    base = np.array([0, 5, -1, 300], np.int32)
    got = maps.kernel_page_indices(torch.from_numpy(base), 21)
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got.numpy(), converter.convert(base))


def test_scatter_without_skipping_writes_every_token() -> None:
    page = page_of([8, 4], 4)
    pool = torch.zeros(3, page.page_bytes, dtype=torch.uint8)
    mapping = maps.map_slots(torch.tensor([9, 2]), page)
    record = (torch.full((2, 8), 7, dtype=torch.uint8), torch.full((2, 4), 9, dtype=torch.uint8))
    ops.scatter(pool, mapping, record, skip="none")
    assert pool[2, 8:16].tolist() == [7] * 8
    assert pool[0, 32 + 8 : 32 + 12].tolist() == [9] * 4
    assert int(pool.sum()) == 2 * (8 * 7 + 4 * 9)


def test_arrays_that_do_not_fit_are_refused() -> None:
    page = page_of([8, 4], 4)
    mapping = maps.map_slots(torch.tensor([0]), page)
    record = (torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8))
    good = torch.zeros(2, page.page_bytes, dtype=torch.uint8)
    for pool in (good.view(torch.int32), good[:, :-1], good[:, ::2], good.view(-1)):
        with pytest.raises(
            kvcm.InvalidArgument, match=r"\[scatter\] pool must be uint8 .* 48 bytes"
        ):
            ops.scatter(pool, mapping, record)
    with pytest.raises(kvcm.InvalidArgument, match=r"record must be .*\(1, 8\), \(1, 4\)"):
        ops.scatter(good, mapping, (record[0], record[0]))
    with pytest.raises(kvcm.InvalidArgument, match="counts must be >= 0, got -1"):
        maps.spread(torch.tensor([2, -1]))
