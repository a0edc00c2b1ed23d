"""Conversions of DeepSeek-V4's indices, against NumPy restatements over random geometries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
from sparse_kvcm.adapter.slot_mapping import PageGeometry, kernel_page_indices  # noqa: E402
from sparse_kvcm.deepseek_v4 import indices  # noqa: E402

torch.set_num_threads(1)
RATIOS = st.sampled_from([4, 128])
SEEDS = st.integers(0, 2**32 - 1)


def tables(rng: np.random.Generator, rows: int, pages: int) -> np.ndarray:
    """Distinct slots, some missing."""
    slots = rng.permutation(rows * pages * 3)[: rows * pages].reshape(rows, pages)
    return np.where(rng.random((rows, pages)) < 0.2, -1, slots).astype(np.int32)


@given(seed=SEEDS, scale=st.integers(1, 9), position=st.integers(0, 8))
@settings(max_examples=60)
def test_tables_agree_with_the_storage_s_own_converters(
    seed: int, scale: int, position: int
) -> None:
    base = tables(np.random.default_rng(seed), 1, 7)[0]
    position %= scale
    for mode, found in (
        (kvcm.PageIndexMode.SHARED, kernel_page_indices(torch.from_numpy(base), scale)),
        (
            kvcm.PageIndexMode.PER_LAYER,
            kernel_page_indices(torch.from_numpy(base), scale, position),
        ),
    ):
        converter = kvcm.PageIndexConverter(scale=scale, position=position, mode=mode)
        np.testing.assert_array_equal(found.numpy(), np.asarray(converter.convert(base)))


@given(
    seed=SEEDS,
    rows=st.integers(1, 4),
    pages=st.integers(0, 5),
    per_page=st.sampled_from([1, 2, 32, 64, 128, 256]),
    first=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_local_rows_become_rows_of_the_pool(
    seed: int, rows: int, pages: int, per_page: int, first: int
) -> None:
    rng = np.random.default_rng(seed)
    table = tables(rng, rows, pages)
    local = rng.integers(-1, (pages + 1) * per_page, (rows, 11)).astype(np.int32)
    wanted = np.full(local.shape, -1, np.int64)
    for (row, column), item in np.ndenumerate(local):
        if item >= 0 and item // per_page < pages and table[row, item // per_page] >= 0:
            page = int(table[row, item // per_page])
            wanted[row, column] = first + page * per_page + item % per_page
    found = indices.global_indices(
        torch.from_numpy(table), torch.from_numpy(local), per_page, first
    )
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_rows_of_large_pools_do_not_wrap() -> None:
    table = torch.tensor([[2**25]], dtype=torch.int32)
    found = indices.global_indices(table, torch.tensor([[255]], dtype=torch.int32), 256)
    assert found.item() == 2**33 + 255
    indices.check_row_count("SWA", 2**31)
    with pytest.raises(kvcm.InvalidArgument, match=r"rows of SWA .* 2\^31.* got 2147483649"):
        indices.check_row_count("SWA", 2**31 + 1)


@given(lengths=st.lists(st.integers(0, 600), min_size=1, max_size=5), ratio=RATIOS)
def test_an_entry_exists_once_its_last_token_is_there(lengths: list[int], ratio: int) -> None:
    there = torch.tensor(lengths, dtype=torch.int32)
    whole = [len([t for t in range(n) if (t + 1) % ratio == 0]) for n in lengths]
    assert indices.num_entries(there, ratio).tolist() == whole
    assert indices.completes_entry(there, ratio).tolist() == [
        n > 0 and (n - 1 + 1) % ratio == 0 for n in lengths
    ]
    width = 600 // ratio
    wanted = [[*range(count), *[-1] * (width - count)] for count in whole]
    assert indices.all_entries(there, ratio, width).tolist() == wanted


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    window=st.sampled_from([1, 5, 128]),
)
def test_a_window_has_the_newest_tokens_oldest_first(lengths: list[int], window: int) -> None:
    found = indices.window_positions(torch.tensor(lengths), window).tolist()
    for row, n in zip(found, lengths, strict=True):
        newest = list(range(n))[-window:]
        assert row == newest + [-1] * (window - len(newest))


def test_windows_and_entries_are_one_index_set_in_two_parts() -> None:
    window = torch.tensor([[4, 5, -1]])
    both = indices.join(window, torch.tensor([[9, -1]]))
    assert both.rows.dtype is torch.int32
    assert both.rows.tolist() == [[4, 5, -1, 9, -1]]
    assert both.window.tolist() == [[4, 5, -1]]
    assert both.compressed.tolist() == [[9, -1]]
    assert indices.join(window, None).compressed.shape == (1, 0)


@given(
    seed=SEEDS,
    page=st.sampled_from([128, 256]),
    ratio=RATIOS,
    ring=st.sampled_from([8, 128]),
    regions=st.sampled_from([[576, 8], [512], [1024], [128, 4], [256, 32]]),
)
@settings(max_examples=60)
def test_items_lie_where_their_page_and_row_say(
    seed: int, page: int, ratio: int, ring: int, regions: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    table = tables(rng, 2, 4)
    alignment = 576 if regions[0] == 576 else 1
    layout = kvcm.UnitLayout(regions, page_alignment=alignment)
    for items_per_page, rows_per_page in ((page, ring), (page, page), (page // ratio,) * 2):
        items = rng.integers(-1, 5 * items_per_page, 20)
        rows = rng.integers(0, 2, 20)
        found = indices.map_items(
            torch.from_numpy(table),
            torch.from_numpy(rows),
            torch.from_numpy(items),
            PageGeometry(layout, rows_per_page),
            items_per_page,
        )
        raw = sum(regions) * rows_per_page
        page_bytes = -(-raw // alignment) * alignment
        for region, offsets in enumerate(found.regions):
            begin = sum(regions[:region]) * rows_per_page
            for row, item, offset in zip(rows, items, offsets.tolist(), strict=True):
                column = item // items_per_page
                if item < 0 or column >= 4 or table[row, column] < 0:
                    assert offset == -1
                    continue
                place = begin + (item % rows_per_page) * regions[region]
                assert offset == int(table[row, column]) * page_bytes + place
