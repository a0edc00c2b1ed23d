"""Units that arrive in pages: `reserve_history`, `write_history`, `commit_history` from Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import history, make_config
from foreign_array import ForeignArray
from sparse_kvcm import InvalidArgument, InvalidState

UNITS, PAGE = 10, 4
# Group 0 has layers 0 and 2 of 24 + 8 bytes, group 1 layer 1 of 36. A slot has a gap of 12 bytes.
OFFSETS = {0: [0, PAGE * 24, 300, 300 + PAGE * 24], 1: [PAGE * 32 + 12]}
SLOT_BYTES = 460


def slots(seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (3, SLOT_BYTES), np.uint8)


def piece(source: np.ndarray, offset: int, size: int, unit: int) -> np.ndarray:
    begin = offset + unit % PAGE * size
    return source[unit // PAGE, begin : begin + size]


def expected_row(source: np.ndarray, group: int, unit: int) -> np.ndarray:
    """By falling alignment, then member, then region: 24 and 8 are multiples of 8 alike."""
    sizes = [24, 8, 24, 8] if group == 0 else [36]
    parts = [piece(source, at, n, unit) for at, n in zip(OFFSETS[group], sizes, strict=True)]
    row = np.concatenate(parts)
    return np.pad(row, (0, -len(row) % 16))


@pytest.fixture
def receiving() -> Any:
    manager = kvcm.KvCacheManager(make_config())
    cache = manager.create_kv_cache(100)
    assert cache.reserve_history(UNITS)
    return manager, cache


def test_pages_become_rows_of_host_history_on_any_threads(receiving: Any) -> None:
    manager, cache = receiving
    source = slots()
    calls: list[Callable[[], None]] = [
        lambda g=g, at=at, n=n: cache.write_history(  # type: ignore[misc]
            g, at, n, source[at // PAGE :], OFFSETS[g], PAGE
        )
        for g in (0, 1)
        for at, n in ((8, 2), (0, 8))
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (cache.is_receiving, cache.watermark) == (True, 0)
    cache.commit_history()
    assert (cache.is_receiving, cache.watermark, cache.length) == (False, UNITS, UNITS)
    pages = cache.host_pages
    for group in (0, 1):
        pool = manager.host_history(group)
        for unit in range(UNITS):
            found = pool[pages[unit // PAGE], unit % PAGE]
            np.testing.assert_array_equal(found, expected_row(source, group, unit))


def test_too_few_host_pages_are_a_result_and_change_nothing() -> None:
    manager = kvcm.KvCacheManager(make_config(host_pages=2))
    cache = manager.create_kv_cache(100)
    assert not cache.reserve_history(9)
    assert manager.occupancy().free_host_pages == 2
    assert cache.reserve_history(8)


def test_close_gives_back_what_was_reserved(receiving: Any) -> None:
    manager, cache = receiving
    cache.write_history(1, 0, 3, slots(), OFFSETS[1], PAGE)
    cache.close()
    assert manager.occupancy().free_host_pages == make_config().host_pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 1, slots(), [0], PAGE), r"group must be in \[0, 2\), got 2"),
        (("a", 0, 1, slots(), [0], PAGE), "group must be an int"),
        ((1, -1, 1, slots(), OFFSETS[1], PAGE), r"units must be in \[0, 10\)"),
        ((1, 9, 2, slots(), OFFSETS[1], PAGE), r"units must be in \[0, 10\)"),
        ((1, 0, 9, slots()[:2], OFFSETS[1], PAGE), "at most 2 slots x 4 units, got 9"),
        ((1, 0, 1, slots(), [SLOT_BYTES - 143], PAGE), r"offsets\[0\] must be in \[0, 316\]"),
        ((1, 0, 1, slots(), [-1], PAGE), r"offsets\[0\] must be in \[0, 316\]"),
        ((1, 0, 1, slots(), [0, 0], PAGE), "regions must be 1 member layers x 1 regions, got 2"),
        ((0, 0, 1, slots(), [0, 96, 300], PAGE), "regions must be 2 member layers x 2 regions"),
        ((1, 0, 1, slots(), 3, PAGE), "offsets must be"),
        ((1, 0, 1, slots(), OFFSETS[1], 0), "units_per_page must be in"),
        ((1, 0, 1, slots(), OFFSETS[1], -4), "units_per_page must be in"),
        ((1, 0, 1, slots(), OFFSETS[1], 1 << 30), r"offsets\[0\] must be in"),
        ((1, 0, 1, slots()[0], OFFSETS[1], PAGE), "slots"),
        ((1, 0, 1, slots()[:, ::2], OFFSETS[1], PAGE), "C-contiguous"),
        ((1, 0, 1, slots().view(np.int8), OFFSETS[1], PAGE), "slots"),
        ((1, 0, 1, ForeignArray((3, 100)), OFFSETS[1], PAGE), "slots"),
        ((1, 0, 1, None, OFFSETS[1], PAGE), "slots"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    receiving: Any, arguments: tuple[Any, ...], message: str
) -> None:
    _, cache = receiving
    with pytest.raises(InvalidArgument, match=rf"\[KvCache.write_history\] .*{message}"):
        cache.write_history(*arguments)


def test_a_receiving_request_refuses_all_other_changes(receiving: Any) -> None:
    manager, cache = receiving
    batch = manager.create_batch(2, 100)
    assert cache.resume()
    for call in (
        lambda: cache.reserve_history(1),
        lambda: cache.suspend(),
        lambda: cache.resize(1, 1),
        lambda: cache.import_history(history(manager, 1, 0, 1)),
        lambda: batch.add(cache),
        lambda: cache.commit_history(),
    ):
        with pytest.raises(InvalidState, match="receiving|must be written once"):
            call()


def test_units_past_the_need_and_of_no_number_are_refused() -> None:
    cache = kvcm.KvCacheManager(make_config()).create_kv_cache(100)
    for bad in (0, -1, 101, 1 << 40, 1.5, None):
        with pytest.raises(InvalidArgument, match=r"\[KvCache.reserve_history\] num_units must be"):
            cache.reserve_history(bad)
