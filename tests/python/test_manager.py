"""The manager API on the CPU: memory, lifetimes, and one request's way through its states."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import snapshot
import sparse_kvcm as kvcm
from factories import active, int32, make_config, take_step
from sparse_kvcm import KvCacheState, ResizeResult


@pytest.fixture
def manager() -> kvcm.KvCacheManager:
    return kvcm.KvCacheManager(make_config())


# --- configuration and memory ---
def test_config_keeps_what_it_was_given() -> None:
    config = make_config(tokens_per_block=16, tokens_per_unit=4)
    assert config.units_per_page == 4
    assert config.device == "cpu"
    assert [group.layers for group in config.groups] == [[0, 2], [1]]
    assert [group.top_k for group in config.groups] == [6, 4]
    assert config.groups[0].layout == kvcm.UnitLayout([24, 8])
    assert (config.cached_slots, config.window_slots, config.max_new_units) == (8, 4, 2)
    assert (config.arena_pages, config.host_pages, config.max_leases) == (12, 64, 4)


def test_layout_counts_bytes_and_rounds_pages_up() -> None:
    layout = kvcm.UnitLayout([576, 8], page_alignment=576)
    assert (layout.unit_bytes, layout.region_bytes, layout.page_alignment) == (584, [576, 8], 576)
    assert layout.page_bytes(64) == 37440  # 37,376 B of units, rounded up to 65 x 576
    assert [layout.region_offset(region, 64) for region in (0, 1)] == [0, 36864]
    assert hash(layout) == hash(kvcm.UnitLayout((576, 8), 576))
    assert layout != kvcm.UnitLayout([576, 8])
    assert repr(layout) == "UnitLayout([576, 8], 576)"


def test_manager_names_its_layers_groups_and_bytes(manager: kvcm.KvCacheManager) -> None:
    assert manager.num_groups == 2
    assert manager.layers == [0, 2, 1]
    assert [manager.group_of(layer) for layer in (0, 1, 2)] == [0, 1, 0]
    assert manager.trash_slot == 48
    use = manager.memory_use()
    assert use.arena_bytes == 13 * 4 * (32 + 32 + 36)
    assert use.host_bytes == sum(manager.host_history(g).nbytes for g in (0, 1))
    assert use.metadata_bytes > 0
    free = manager.occupancy()
    assert (free.free_host_pages, free.free_arena_slots, free.free_leases) == (64, 48, 4)
    assert free.largest_free_arena_run == 48


def test_memory_is_shared_writable_and_outlives_its_manager(manager: kvcm.KvCacheManager) -> None:
    arena, host = manager.arena(1), manager.host_history(0)
    assert isinstance(arena, np.ndarray)
    assert (arena.dtype, arena.shape) == (np.uint8, (13, 4 * 36))
    assert (host.dtype, host.shape) == (np.uint8, (64, 4, 64))
    arena[3, 5], host[60, 1, 2] = 17, 18
    assert manager.arena(1)[3, 5] == 17
    assert manager.host_history(0)[60, 1, 2] == 18
    assert manager.arena(1).ctypes.data == arena.ctypes.data
    del manager
    gc.collect()
    assert (arena[3, 5], host[60, 1, 2]) == (17, 18)


def test_memory_of_the_manager_goes_to_torch_without_a_copy(manager: kvcm.KvCacheManager) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(manager.arena(0))
    tensor[2, 3] = 99
    assert manager.arena(0)[2, 3] == 99


def test_row_states_and_page_table_are_read_only_views(manager: kvcm.KvCacheManager) -> None:
    batch = manager.create_batch(3, 100)
    states, table = batch.row_states, batch.page_table
    assert (states.dtype, states.shape) == (np.int32, (3, 8))
    assert (table.dtype, table.shape) == (np.int32, (3, 25))
    assert batch.max_pages == 25
    with pytest.raises(ValueError, match="read-only"):
        states[0, 0] = 1
    cache = active(manager, 100, 9)
    batch.add(cache, 2)
    batch.publish()
    lease = cache.lease
    assert lease is not None
    assert states[2].tolist() == [lease.id, lease.base, 8, 4, 9, 9, 9, 9]
    assert table[2].tolist() == [*cache.host_pages, *[-1] * 22]


# --- requests ---
@pytest.mark.parametrize(
    ("need", "slots"), [(1, (0, 4)), (12, (0, 12)), (13, (8, 4)), (2**24 - 1, (8, 4))]
)
def test_lease_is_all_window_if_the_need_fits_it(
    manager: kvcm.KvCacheManager, need: int, slots: tuple[int, int]
) -> None:
    cache = manager.create_kv_cache(need)
    assert cache.state == KvCacheState.SUSPENDED
    assert cache.lease is None
    assert cache.resume()
    assert cache.lease is not None
    assert (cache.lease.cached_slots, cache.lease.window_slots) == slots
    assert cache.need == need


def test_batch_takes_a_request_of_2_to_the_24_minus_1_units(manager: kvcm.KvCacheManager) -> None:
    batch = manager.create_batch(1, 2**24 - 1)
    cache = active(manager, 2**24 - 1, 8)
    assert batch.add(cache) == 0
    assert take_step(batch, row0=9) == {0: ResizeResult.OK}


def test_resume_without_room_returns_false_and_changes_nothing(
    manager: kvcm.KvCacheManager,
) -> None:
    holders = [active(manager, 100, 4) for _ in range(4)]
    late = manager.create_kv_cache(100)
    before = snapshot.of_manager(manager) | snapshot.of_request(late)
    assert late.resume() is False
    after = snapshot.of_manager(manager) | snapshot.of_request(late)
    assert snapshot.differences(before, after) == []
    holders[0].close()
    assert late.resume() is True
    assert late.resume() is True  # a no-op


def test_dropped_request_is_closed_and_leaves_its_seat(manager: kvcm.KvCacheManager) -> None:
    fresh = manager.occupancy()
    batch, cache = manager.create_batch(2, 100), active(manager, 100, 20)
    batch.add(cache)
    del cache
    gc.collect()
    after = manager.occupancy()
    assert after.free_host_pages == fresh.free_host_pages
    assert after.free_leases == fresh.free_leases
    another = active(manager, 100, 3)
    assert batch.add(another) == 0


def test_requests_and_batches_keep_their_manager_alive() -> None:
    manager = kvcm.KvCacheManager(make_config())
    batch, cache = manager.create_batch(1, 50), active(manager, 50, 30)
    del manager
    gc.collect()
    batch.add(cache)
    take_step(batch, row0=31)
    slots = batch.resolve(0, int32(0), int32([7, 30])).slots
    del batch, cache
    gc.collect()
    assert slots[0, 1] >= 0


def test_import_takes_any_dtype_and_row_stride(manager: kvcm.KvCacheManager) -> None:
    rng = np.random.default_rng(5)
    wide = rng.integers(-99, 99, (10, 16), np.int32)
    layers = {0: wide[:, :8], 2: rng.normal(size=(10, 2, 2)), 1: rng.normal(size=(10, 9))}
    layers[1] = layers[1].astype(np.float32)
    cache = manager.create_kv_cache(100)
    cache.import_history(layers)
    host = {group: manager.host_history(group).reshape(256, -1) for group in (0, 1)}
    pages = np.repeat(cache.host_pages, 4)[:10] * 4 + np.arange(10) % 4
    for layer, member, group in [(0, 0, 0), (2, 1, 0), (1, 0, 1)]:
        layout = manager.config.groups[group].layout
        row = kvcm.ops.host_row(layout, len(manager.config.groups[group].layers))
        given = np.ascontiguousarray(layers[layer]).reshape(10, -1).view(np.uint8)
        begin = 0
        for piece in sorted((p for p in row.pieces if p.member == member), key=lambda p: p.region):
            stored = host[group][pages, piece.offset : piece.offset + piece.bytes]
            assert (stored == given[:, begin : begin + piece.bytes]).all()
            begin += piece.bytes


def test_import_takes_torch_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    group = kvcm.SelectionGroupConfig([0], 4, kvcm.UnitLayout([64]))
    manager = kvcm.KvCacheManager(make_config(groups=[group]))
    units = torch.randn(6, 32).to(torch.bfloat16)
    cache = manager.create_kv_cache(100)
    cache.import_history({0: units})
    stored = manager.host_history(0)[cache.host_pages].reshape(-1, 64)[:6]
    assert (stored == units.view(torch.uint8).numpy()).all()


# --- storage ---
def test_host_history_lives_in_the_managers_storage(manager: kvcm.KvCacheManager) -> None:
    storage = manager.storage
    pools = storage.pool_group_descs()[0]
    for group, pool in enumerate(pools):
        history = manager.host_history(group)
        assert pool.base_address == history.__array_interface__["data"][0]
        assert pool.num_slots == len(history) == 64
        assert pool.slot_bytes == history[0].nbytes
    cache = active(manager, 100, 30)
    (statistics,) = storage.get_storage_statistics(1)
    assert statistics.total == 64
    assert statistics.free == manager.occupancy().free_host_pages == 64 - len(cache.host_pages)


def test_the_managers_storage_can_only_be_looked_at(manager: kvcm.KvCacheManager) -> None:
    storage = manager.storage
    with pytest.raises(kvcm.InvalidState, match=r"\[Storage.resize\] .* a KvCacheManager"):
        storage.resize(1, 1)
    with pytest.raises(kvcm.InvalidState, match=r"\[Storage.create_request_pages\]"):
        storage.create_request_pages()
    with pytest.raises(AttributeError):
        manager.storage = storage  # type: ignore[misc]
    storage.trim()
    storage.wait_usable(1)
    assert storage.get_storage_statistics(1)[0].free == 64


def test_the_storage_outlives_the_manager() -> None:
    storage = kvcm.KvCacheManager(make_config()).storage
    gc.collect()
    assert storage.get_storage_statistics(1)[0].free == 64
    assert (storage.pool_memory(0, 0) == 0).all()


def test_records_print_and_compare_their_fields(manager: kvcm.KvCacheManager) -> None:
    cache: Any = active(manager, 100, 30)
    lease = cache.lease
    assert repr(lease) == (
        f"Lease(id=0, base=0, cached_slots=8, window_slots=4, generation={lease.generation})"
    )
    assert lease == cache.lease
    assert hash(lease) == hash(cache.lease)
    assert lease != "something else"
    assert repr(cache) == "<KvCache ACTIVE length=30 need=100>"
    assert repr(manager.occupancy()).startswith("Occupancy(free_host_pages=")
