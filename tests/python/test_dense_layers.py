"""A manager with dense layers beside the sparse ones: pages, tables, suspension, threads."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import history, make_config
from sparse_kvcm import BufferConfig, LayerConfig, ResizeResult

KIB = 1024


def dense_config(**changes: Any) -> kvcm.KvCacheManagerConfig:
    """Keeps everything in layer 10, a window of 8 tokens in layer 11."""
    fields: dict[str, Any] = {
        "dense_layers": [
            LayerConfig(10, [BufferConfig("INDEX_KEY", 128 * KIB)]),
            LayerConfig(11, [BufferConfig("KEY", 256 * KIB)], sliding_window_size=8),
        ],
        "gpu_quota": 1,
    }
    return make_config(**(fields | changes))


@pytest.fixture
def manager() -> kvcm.KvCacheManager:
    return kvcm.KvCacheManager(dense_config())


def group_of(manager: kvcm.KvCacheManager, layer: int) -> int:
    return manager.storage.layout.get_layer_group_id(layer)


def prefilled(manager: kvcm.KvCacheManager, length: int, need: int = 60) -> kvcm.KvCache:
    cache = manager.create_kv_cache(need)
    cache.import_history(history(manager, 1, 0, length))
    assert cache.resume()
    assert cache.resize(length, length)
    return cache


def key_pages(manager: kvcm.KvCacheManager, layer: int) -> Any:
    """The pool of a dense layer, uint8 (slots, bytes)."""
    place = manager.storage.layout.place(layer, "INDEX_KEY" if layer == 10 else "KEY")
    return manager.storage.pool_memory(place.pool_group, place.pool)


def test_a_config_of_sparse_layers_needs_none_of_it() -> None:
    config = make_config()
    assert config.dense_layers == []
    assert config.gpu_quota == 0
    assert kvcm.KvCacheManager(config).create_batch(1, 8).num_layer_groups == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_quota": 0}, ["gpu_quota", "got 0"]),
        ({"dense_layers": []}, ["gpu_quota must be in [0, 0]", "got 1"]),
        ({"cold_quota": -1}, ["cold_quota", "got -1"]),
        ({"max_util_for_resume": 0.0}, ["max_util_for_resume must be in [0.001, 1]"]),
        (
            {"dense_layers": [LayerConfig(0, [BufferConfig("KEY", 64)])]},
            ["dense_layers[0].layer_id", "got 0"],
        ),
        (
            {"dense_layers": [LayerConfig(9, [BufferConfig("KEY", 64, is_sparse=True)])]},
            ["dense_layers[0]", "sparse"],
        ),
        ({"dense_layers": [3]}, ["dense_layers[0] must be a LayerConfig", "got int 3"]),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(kvcm.InvalidArgument) as refusal:
        dense_config(**changes)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("gpu_quota", [1, 5 << 20, (64 << 20) + 1])
@pytest.mark.parametrize("cold_quota", [0, 1, 9 << 20])
@pytest.mark.parametrize("host_pages", [1, 33, 3000])
def test_planned_memory_is_what_pools_take(
    gpu_quota: int, cold_quota: int, host_pages: int
) -> None:
    config = dense_config(gpu_quota=gpu_quota, cold_quota=cold_quota, host_pages=host_pages)
    planned, manager = kvcm.planned_memory(config), kvcm.KvCacheManager(config)
    assert planned == manager.memory_use()
    assert planned.dense_bytes == manager.storage.get_num_bytes(0) >= gpu_quota
    page = os.sysconf("SC_PAGESIZE")
    pools = [manager.host_history(g).nbytes for g in range(manager.num_groups)]
    history = sum(-(-size // page) * page for size in pools)
    assert planned.cold_bytes == manager.storage.get_num_bytes(1) - history
    assert planned.cold_bytes >= cold_quota - (2 << 20)  # less than a granule is no page


def test_a_manager_of_sparse_layers_has_no_pools() -> None:
    use = kvcm.planned_memory(make_config())
    assert (use.dense_bytes, use.cold_bytes) == (0, 0)
    assert use == kvcm.KvCacheManager(make_config()).memory_use()


def test_tables_of_a_batch_show_what_requests_have(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(2, 60), prefilled(manager, 22)
    tables, counts = batch.page_tables, batch.page_counts
    assert tables.shape == (3, 2, batch.max_pages)
    batch.add(cache)
    assert batch.resize_tokens({0: 23}) == {0: ResizeResult.OK}
    assert batch.publish() == [0, 1]
    for group in range(3):
        expected = cache.get_base_page_indices(group).tolist()
        assert tables[group, 0, : len(expected)].tolist() == expected
        assert (tables[group, 0, len(expected) :] == -1).all()
        assert counts[group].tolist() == [len(expected), 0]
    assert (tables[:, 1] == -1).all()
    assert (tables[group_of(manager, 0)] == batch.page_table).all()


def test_tables_outlive_their_batch_and_manager() -> None:
    manager = kvcm.KvCacheManager(dense_config())
    batch = manager.create_batch(2, 60)
    batch.publish()
    tables, address = batch.page_tables, batch.page_tables.ctypes.data
    batch.abort_step()
    assert batch.page_tables.ctypes.data == address
    del batch, manager
    gc.collect()
    assert (tables == -1).all()


def test_suspended_pages_come_back_with_their_bytes(manager: kvcm.KvCacheManager) -> None:
    cache = prefilled(manager, 22)
    group = group_of(manager, 10)
    pages = key_pages(manager, 10)
    for number, slot in enumerate(cache.get_base_page_indices(group)):
        pages[slot] = number + 1
    assert cache.suspend() is None
    assert (cache.get_base_page_indices(group) == -1).all()
    pages[:] = 255
    assert cache.resume()
    for number, slot in enumerate(cache.get_base_page_indices(group)):
        assert (pages[slot] == number + 1).all()
    copies = manager.get_and_reset_copy_statistics()
    assert (copies.pages_to_host, copies.pages_to_gpu) == (6 + 3, 6 + 3)
    assert cache.get_and_reset_statistics()[group].num_copied_to_host == 6


def test_full_cold_pools_leave_a_request_active(manager: kvcm.KvCacheManager) -> None:
    asleep = prefilled(manager, 22)
    asleep.suspend()
    others = [prefilled(manager, 22) for _ in range(2)]
    with pytest.raises(kvcm.OutOfPages, match="cold_quota"):
        list(map(kvcm.KvCache.suspend, others))
    assert others[-1].state == kvcm.KvCacheState.ACTIVE
    assert manager.poison_reason == ""


def test_a_pool_group_that_is_full_refuses_to_resume(manager: kvcm.KvCacheManager) -> None:
    first, second = prefilled(manager, 32), prefilled(manager, 32)
    assert not manager.create_kv_cache(8).resume()
    uses = {use.utilization for use in manager.pool_group_use() if use.level == 0}
    assert max(uses) == 1.0
    first.close()
    assert manager.create_kv_cache(8).resume()
    second.close()


def test_an_index_buffer_follows_the_table_and_is_let_go(manager: kvcm.KvCacheManager) -> None:
    cache = manager.create_kv_cache(60)
    group = group_of(manager, 10)
    buffer = np.full(15, 77, np.int32)
    cache.set_base_page_index_buf(group, buffer)
    cache.import_history(history(manager, 1, 0, 22))
    assert cache.resume()
    assert cache.resize(22, 22)
    expected = cache.get_base_page_indices(group).tolist()
    assert buffer.tolist() == expected + [-1] * (15 - len(expected))
    with pytest.raises(kvcm.InvalidArgument, match="at least 15 entries"):
        cache.set_base_page_index_buf(group, np.zeros(14, np.int32))
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is not None
    cache.close()
    gc.collect()
    assert gone() is None


def test_batched_resize_in_units_is_refused(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(1, 60), prefilled(manager, 8)
    batch.add(cache)
    with pytest.raises(kvcm.InvalidState, match="resize_tokens"):
        batch.resize({0: 9})
    with pytest.raises(kvcm.InvalidArgument, match=r"capacities\[0\] must be an int"):
        batch.resize_tokens({0: "9"})  # type: ignore[dict-item]


def test_threads_with_a_request_each_share_a_manager(manager: kvcm.KvCacheManager) -> None:
    fresh = repr(manager.occupancy())
    failures: list[BaseException] = []

    def live(number: int) -> None:
        try:
            for length in range(1, 40):
                cache = manager.create_kv_cache(60)
                cache.import_history(history(manager, number, 0, length % 9 + 1))
                if cache.resume():
                    cache.resize(length % 9 + 1, length % 9 + 1)
                    cache.suspend()
                cache.close()
        except kvcm.OutOfPages:
            pass
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=live, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert failures == []
    assert repr(manager.occupancy()) == fresh
