"""Managers without groups: every layer dense, and units that follow the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from sparse_kvcm import BufferConfig, KvCacheManagerConfig, LayerConfig

KIB = 1024


def config(**changes: Any) -> KvCacheManagerConfig:
    fields: dict[str, Any] = {
        "dense_layers": [
            LayerConfig(0, [BufferConfig("KEY", 128 * KIB)]),
            LayerConfig(1, [BufferConfig("INDEX_KEY", 128 * KIB)]),
        ],
        "gpu_quota": 1,
        "tokens_per_block": 4,
    }
    return KvCacheManagerConfig(**(fields | changes))


def test_requests_decode_without_leases_and_history() -> None:
    manager = kvcm.KvCacheManager(config())
    use = manager.memory_use()
    assert use.arena_bytes == use.metadata_bytes == use.host_bytes == 0
    assert use == kvcm.planned_memory(config())
    assert manager.storage.layout.num_levels == 1
    assert (manager.num_groups, manager.layers, manager.trash_slot) == (0, [], 0)
    batch = manager.create_batch(2, 64)
    cache = manager.create_kv_cache(40)
    assert cache.resume()
    assert cache.resize(6, 6)
    assert cache.committed_length == 6
    assert cache.lease is None
    row = batch.add(cache)
    written = []
    for length in (7, 8, 9):
        assert batch.resize_tokens({row: length}) == {row: kvcm.ResizeResult.OK}
        batch.publish()
        written.append(batch.table_rows)
        batch.wait_ready()
        batch.record_read([row])
        assert cache.history_length == cache.committed_length == length
        tables = np.asarray(batch.page_tables)
        assert tables.shape[0] == batch.num_layer_groups == 1
        table = list(cache.get_base_page_indices(0))
        assert list(tables[0, row, : len(table)]) == table
        assert set(tables[0, row, len(table) :]) == {-1}
    assert written == [[0, 1], [], [0]]
    with pytest.raises(kvcm.OutOfPages, match="raise cold_quota"):
        cache.suspend()
    assert cache.row == row


def test_calls_on_history_are_refused() -> None:
    manager = kvcm.KvCacheManager(config())
    batch = manager.create_batch(1, 8)
    cache = manager.create_kv_cache(8)
    with pytest.raises(kvcm.InvalidState, match="no groups, so no host history; resize"):
        cache.import_history({})
    with pytest.raises(kvcm.InvalidState, match="no groups, so no host history"):
        _ = batch.page_table
    with pytest.raises(kvcm.InvalidArgument, match="cached_slots must be -1 in a manager without"):
        manager.create_kv_cache(8, 4)


@pytest.mark.parametrize(
    "field", ["cached_slots", "window_slots", "arena_pages", "host_pages", "max_leases"]
)
def test_sizes_of_history_are_refused(field: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=f"{field} must be 0 without groups.*got 4"):
        config(**{field: 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_layers": [], "gpu_quota": 0}, "groups must not be empty without dense_layers"),
        ({"gpu_quota": 0}, "gpu_quota must be in"),
        ({"max_new_units": 0}, r"max_new_units must be in \[1, 16777215\], got 0"),
    ],
)
def test_a_manager_of_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=message):
        config(**changes)


def test_roles_name_the_regions_of_member_layers() -> None:
    def made(roles: Any) -> KvCacheManagerConfig:
        group = kvcm.SelectionGroupConfig([3], 4, kvcm.UnitLayout([8, 4]), roles)
        assert group.roles == list(roles)
        return KvCacheManagerConfig(
            groups=[group],
            cached_slots=8,
            window_slots=4,
            arena_pages=4,
            host_pages=4,
            max_leases=1,
            tokens_per_block=4,
        )

    for roles, pages in ((("A", "B"), [32, 16]), ((), [48])):
        layout = kvcm.KvCacheManager(made(roles)).storage.layout
        assert [layout.place(3, role).page_bytes for role in roles or ("KEY",)] == pages
    with pytest.raises(kvcm.InvalidArgument, match=r"groups\[0\].roles must name each of the 2"):
        made(["A"])
    with pytest.raises(kvcm.InvalidArgument, match='"A" is taken by another buffer'):
        made(["A", "A"])
