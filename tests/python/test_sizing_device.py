"""The device budget: what leaves it before the pools, and what the pools hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, small, tiny_dsa, tiny_v4
from sparse_kvcm.models import load_geometry
from sparse_kvcm.sizing import Workload, find_capacity, size_device
from sparse_kvcm.sizing.buffers import batch_memory, engine_buffers, manager_memory
from sparse_kvcm.sizing.device import max_batch, pool_tokens, quota_for_tokens
from sparse_kvcm.sizing.host import page_bytes


def address(array: Any) -> int:
    return int(np.asarray(array).__array_interface__["data"][0])


@pytest.mark.parametrize("rows", [1, 2, 3, 21, 64, 65])
@pytest.mark.parametrize("length", [65, 1000])
def test_a_batch_s_bytes_are_those_from_its_first_array_to_its_last(rows: int, length: int) -> None:
    workload = small(length)
    config = workload.manager_config(rows, host_pages=4)
    manager = kvcm.KvCacheManager(config)
    batch = manager.create_batch(rows, workload.max_units)
    batch.publish()
    batch.wait_ready()
    last = manager.num_groups - 1
    selection = np.full((rows, workload.geometry.top_k), -1, np.int32)
    out = batch.resolve(last, np.full(rows, -1, np.int32), selection)
    end = address(out.errors) + rows * 4
    used = end - address(batch.row_states)
    assert batch_memory(workload, rows).device_bytes == -(-used // 256) * 256
    assert batch.memory_use() == batch_memory(workload, rows)
    assert batch.max_pages == workload.pages(length)


@pytest.mark.parametrize("factor", [1, 1.01, 2, 3.5])
@pytest.mark.parametrize("geometry", [tiny_dsa(), tiny_v4(), tiny_dsa(1, top_k=7)])
def test_arena_and_entries_are_what_a_manager_holds(geometry: Any, factor: float) -> None:
    workload = small(1000, geometry=geometry, gpu_cache_factor=factor)
    config = workload.manager_config(3, host_pages=2)
    manager = kvcm.KvCacheManager(config)
    planned = manager_memory(workload, 3)
    arenas = [np.asarray(manager.arena(layer)) for layer in manager.layers]
    assert planned.arena_bytes == sum(arena.nbytes for arena in arenas)
    assert planned.metadata_bytes == len(geometry.groups) * 4 * (
        3 * workload.lease_pages * workload.units_per_page + 3
    )
    assert kvcm.planned_memory(config) == manager.memory_use()
    assert config.cached_slots >= factor * geometry.top_k
    assert config.cached_slots < factor * geometry.top_k + workload.units_per_page


def test_a_lease_is_no_longer_than_its_request() -> None:
    assert small(100).lease_pages == 2  # all window
    assert small(5000).lease_pages == 3  # 2 x 64 cached slots and a page of window


def test_what_is_no_pool_leaves_the_budget_first() -> None:
    workload = small(1000, num_batches=2)
    budget = 64 * MIB
    sizing = size_device(workload, budget, 5, offload=True)
    manager = manager_memory(workload, 5)
    assert sizing.layout is not None
    engine = sum(s.num_bytes for s in engine_buffers(workload, sizing.layout, 5, offload=True))
    assert sizing.fixed == {
        "arena": manager.arena_bytes,
        "entries": manager.metadata_bytes,
        "batch buffers": 2 * batch_memory(workload, 5).device_bytes,
        "attention buffers": 2 * engine,
    }
    assert sizing.pool_quota <= budget - sizing.fixed_bytes < sizing.pool_quota + 2 * MIB
    assert sizing.total_bytes <= budget


def test_attention_buffers_have_converted_tables_and_the_selection() -> None:
    workload = small(1000)
    layout = size_device(workload, 64 * MIB, 5, offload=True).layout
    assert layout is not None
    shapes = {s.name: s.shape for s in engine_buffers(workload, layout, 5, offload=True)}
    assert shapes == {
        "page_indices_1_0": (5, 16),
        "attention_indices": (5, 64),
    }


def test_tables_of_slots_are_the_batch_s_where_there_is_one() -> None:
    workload = small(1000)
    manager = kvcm.KvCacheManager(workload.manager_config(5))
    batch = manager.create_batch(5, workload.max_units)
    assert batch.page_tables.shape == (2, 5, 16)  # history and index keys
    layout = size_device(workload, 64 * MIB, 5, offload=False).layout
    assert layout is not None
    names = [s.name for s in engine_buffers(workload, layout, 5, offload=False)]
    assert names == ["page_table_0", "page_indices_0_0", "page_indices_0_1"]


def test_nvfp4_has_scratch_for_the_selection_with_a_tile_to_spare() -> None:
    geometry = tiny_dsa(kv_lora_rank=48, qk_rope_head_dim=16)
    workload = small(1000, geometry=geometry, kv_dtype="nvfp4", tokens_per_block=64)
    layout = size_device(workload, 64 * MIB, 3, offload=True).layout
    assert layout is not None
    specs = {s.name: s for s in engine_buffers(workload, layout, 3, offload=True)}
    assert specs["nvfp4_scratch"].shape == (256 + 128, 36)  # 3 x 64 rows are 192


def test_a_resident_worker_has_neither_arena_nor_batch() -> None:
    sizing = size_device(small(1000), 64 * MIB, 5, offload=False)
    assert set(sizing.fixed) == {"attention buffers"}


def test_resident_pools_hold_index_keys_too() -> None:
    geometry = load_geometry("glm-5.2")
    sizing = size_device(Workload(geometry, 32_928, "fp8"), 100 * GIB, 1, offload=False)
    assert sizing.layout is not None
    slots = sizing.layout.count_slots(kvcm.BatchDesc([kvcm.KvCacheDesc(64, 63)]))
    per_page = sum(
        n * sum(g.slot_bytes) for n, g in zip(slots, sizing.layout.pool_groups, strict=True)
    )
    assert per_page == 64 * 47_700
    # And so does the quota of a number of tokens, which a warm-up is estimated with.
    more = quota_for_tokens(sizing, 32_928 * 64) - quota_for_tokens(sizing, 32_928 * 32)
    assert more == pytest.approx(32_928 * 32 * 47_700 / 0.97, rel=0.01)


# 33,024 = 129 x 256: at the last token of a page a window has one page, at the first it has two.
@pytest.mark.parametrize("length", [33_024, 33_023, 33_025, 32_769])
@pytest.mark.parametrize("offload", [False, True])
def test_windows_are_held_at_their_widest_for_every_request(length: int, offload: bool) -> None:
    geometry = load_geometry("deepseek-v4-flash")
    workload = Workload(geometry, length, tokens_per_block=256)
    batch = 100
    sizing = size_device(workload, 64 * GIB, batch, offload=offload)
    assert sizing.layout is not None
    slots = sizing.layout.min_slots()  # of the smallest budget that holds them
    for group in sizing.layout.layer_groups:
        if group.life_cycle.sliding_window_size in (8, 128):
            assert 2 * batch <= slots[group.pool_group] * workload.max_util_for_resume


def test_pool_ratio_samples_the_first_token_of_the_last_page() -> None:
    workload = Workload(load_geometry("deepseek-v4-flash"), 33_024, tokens_per_block=256)
    sizing = size_device(workload, 64 * GIB, 100, offload=True)
    assert sizing.storage is not None
    step = sizing.storage.typical_step
    assert step is not None
    # Decode only: no context, no other length.
    assert [(c.capacity, c.history_length) for c in step.kv_caches] == [(32_769, 32_768)]


def test_no_constraint_of_an_offloading_worker_is_a_context() -> None:
    storage = size_device(small(1000), 64 * MIB, 5, offload=True).storage
    assert storage is not None
    for batch in storage.constraints:
        assert all(c.capacity - c.history_length == 1 for c in batch.kv_caches)


def test_floors_hold_whatever_the_budget_and_the_utilisation() -> None:
    for util in (0.5, 0.97, 1.0):
        workload = small(1000, max_util_for_resume=util)
        sizing = size_device(workload, 64 * MIB, 5, offload=True)
        assert sizing.layout is not None
        assert util * sizing.layout.min_slots()[0] >= 5 * 16


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    workload = small(20_000)
    for offload in (False, True):
        capacity = find_capacity(workload, 80 * MIB, offload=offload)
        assert capacity.batch > 1
        assert size_device(workload, 80 * MIB, capacity.batch, offload=offload).fits
        assert not size_device(workload, 80 * MIB, capacity.batch + 1, offload=offload).fits


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 9, 100])
def test_max_batch_finds_the_last_that_fits(most: int) -> None:
    for hint in (-1, 0, 1, 2, 8, 9, 49, 50, 51, 10**9):
        for limit in (0, 1, 2, 50):
            assert max_batch(lambda n: n <= most, limit, hint) == min(most, limit)


def test_a_search_that_begins_near_the_end_is_short() -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= 1500

    assert max_batch(fits, 1 << 20, 1490) == 1500
    assert len(asked) <= 8


def test_a_quota_turned_to_tokens_and_back_is_no_larger() -> None:
    for budget in range(20 * MIB, 60 * MIB, 3 * MIB + 7):
        sizing = size_device(small(5000), budget, 40, offload=True)
        if not sizing.pool_quota:
            continue
        tokens = pool_tokens(sizing)
        assert quota_for_tokens(sizing, tokens) <= max(sizing.pool_quota, sizing.pool_floor)
        assert tokens % 64 == 0


def test_tokens_of_short_requests_are_counted_in_whole_pages() -> None:
    sizing = size_device(small(1), 64 * MIB, 1000, offload=True)
    assert pool_tokens(sizing) == 1000 * 64  # a page each, whatever the length


def test_pools_of_more_slots_than_have_numbers_do_not_fit() -> None:
    workload = small(60_000, tokens_per_block=1, max_util_for_resume=0.001)
    assert not size_device(workload, 1 << 60, 100, offload=True).fits


def test_capacity_names_the_limit_that_binds_and_the_batch() -> None:
    workload = small(20_000)
    page = 64 * (48 + 48 + 144)  # bytes of a history page: rows of 36, 36 and 4 x 36 up to 16
    host = 2 * 313 * page
    assert find_capacity(workload, GIB, offload=True, host_bytes=host).binding == "host history"
    assert find_capacity(workload, GIB, offload=True, host_bytes=host).batch == 2
    assert find_capacity(workload, GIB, offload=True, host_bytes=312 * page).batch == 0
    wide = tiny_dsa(kv_lora_rank=512, qk_rope_head_dim=64)
    arena = find_capacity(small(1000, geometry=wide), 64 * MIB, offload=True)
    assert arena.binding == "arena"
    assert find_capacity(workload, 64 * MIB, offload=True).binding == "device pools"
    assert find_capacity(workload, GIB, offload=True, max_batch_size=2).binding == "max_batch_size"
    assert "raise max_batch_size" in str(
        find_capacity(workload, GIB, offload=True, max_batch_size=2)
    )


def test_of_equal_limits_the_larger_share_of_the_device_binds() -> None:
    glm = Workload(load_geometry("glm-5.2"), 16_777_160, "fp8")  # pages of 46.5 GB, a lease of 0.2
    for budget in (45_600_000_000, 1_000_000):
        capacity = find_capacity(glm, budget, offload=True)
        assert capacity.limits == {"arena": 0, "device pools": 0}
        assert capacity.binding == "device pools"
    capacity = find_capacity(Workload(load_geometry("glm-5.2"), 8000, "fp8"), MIB, offload=True)
    assert (capacity.batch, capacity.binding) == (0, "arena")


def test_of_equal_limits_max_batch_size_comes_before_the_history_sized_for_it() -> None:
    host = 2 * 313 * page_bytes(small(20_000))
    capacity = find_capacity(small(20_000), GIB, offload=True, host_bytes=host, max_batch_size=2)
    assert capacity.limits["host history"] == capacity.limits["max_batch_size"] == 2
    assert str(capacity).startswith("2 requests fit; max_batch_size binds: raise max_batch_size")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 0}, r"max_seq_len must be an integer in \[1, 16777215\], got 0"),
        ({"max_seq_len": 1 << 24}, "max_seq_len must be .*, got 16777216"),
        ({"max_seq_len": 10.5}, "max_seq_len must be an integer .*, got 10.5"),
        ({"avg_seq_len": 1001}, r"avg_seq_len must be an integer in \[1, 1000\], got 1001"),
        ({"gpu_cache_factor": 0.5}, r"gpu_cache_factor must be in \[1, .*, got 0.5"),
        ({"gpu_cache_factor": 1024}, "gpu_cache_factor must be in .*, got 1024"),
        ({"gpu_cache_factor": 1023.1}, r"gpu_cache_factor must be in \[1, 1023\], .*, got 1023.1"),
        ({"tokens_per_block": 65_537}, r"tokens_per_block must be .* 65536\], got 65537"),
        ({"max_util_for_resume": 0}, r"max_util_for_resume must be in \[0.001, 1\], got 0"),
        ({"kv_dtype": "int8"}, "kv_dtype of a DSA model must be one of .*, got 'int8'"),
        ({"index_dtype": "int8"}, "index_dtype must be one of .*, got 'int8'"),
        ({"gpu_cache_factor": float("nan")}, "gpu_cache_factor must be in .*, got nan"),
        ({"num_batches": 0}, r"num_batches must be an integer in \[1, 16\], got 0"),
    ],
)
def test_a_bad_workload_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=message):
        small(**({"max_seq_len": 1000} | changes))


@pytest.mark.parametrize(
    ("model", "page"), [("deepseek-v4-flash", 256), ("deepseek-v4-pro", 128), ("glm-5.2", 64)]
)
def test_no_length_takes_more_slots_than_the_sampled_one(model: str, page: int) -> None:
    workload = Workload(load_geometry(model), 33_024, tokens_per_block=page)
    layout = size_device(workload, GIB, 1, offload=True).layout
    assert layout is not None
    most = layout.count_slots(workload.decode_step(1, workload.sampled_length(33_024)))
    for length in range(33_024 - 2 * page, 33_025):
        slots = layout.count_slots(workload.decode_step(1, length))
        assert all(have <= limit for have, limit in zip(slots, most, strict=True)), length
