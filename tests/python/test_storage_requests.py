"""Page tables of requests, step by step against a plain model; capacity of a Storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_kvcm as kvcm
import storage_oracle as oracle
from storage_configs import MIB, configs, dense_layer, gpu_tier, host_tier, make_config

PER_LAYER = kvcm.PageIndexMode.PER_LAYER


def live_pages(
    config: kvcm.StorageConfig, group: oracle.Group, capacity: int, history: int
) -> set[int]:
    tokens = config.tokens_per_block
    pages = set(range(-(-capacity // tokens)))
    return pages - set(oracle.stale(group.window, group.sinks, tokens, history))


def scratch_of(
    config: kvcm.StorageConfig, group: oracle.Group, capacity: int, history: int
) -> list[int]:
    if config.swa_scratch_reuse is None:
        return []
    rewind = config.swa_scratch_reuse.max_rewind_len
    return oracle.scratch(
        group.window, group.sinks, config.tokens_per_block, history, capacity, rewind
    )


class Model:
    """One request: its slots in each layer group."""

    def __init__(self, storage: kvcm.Storage) -> None:
        self.pages = storage.create_request_pages()
        self.tables: list[dict[int, int]] = [{} for _ in storage.layout.layer_groups]
        self.scratch: list[int] = [0] * len(self.tables)

    def check(self, config: kvcm.StorageConfig, groups: list[oracle.Group]) -> None:
        """Wanted pages have a slot, that they keep; others have none."""
        capacity, history = self.pages.capacity, self.pages.history_length
        for i, group in enumerate(groups):
            shares = scratch_of(config, group, capacity, history)
            want = live_pages(config, group, capacity, history) - set(shares)
            table = self.pages.get_base_page_indices(i)
            now = {p: int(slot) for p, slot in enumerate(table) if slot >= 0}
            assert set(now) == want
            kept = set(now) & set(self.tables[i])
            assert {p: now[p] for p in kept} == {p: self.tables[i][p] for p in kept}
            got = self.pages.get_swa_scratch_range(i)
            assert list(range(got.begin, got.end)) == shares
            slots = self.pages.get_scratch_slots(i)
            assert len(slots) == oracle.scratch_slots(group, len(shares))
            self.tables[i], self.scratch[i] = now, len(slots)

    def used(self, pools: oracle.Pools) -> int:
        return sum(len(self.tables[i]) + self.scratch[i] for i in pools.groups)


@settings(max_examples=40)
@given(configs(), st.data())
def test_tables_follow_lengths_and_accounts_stay_exact(
    config: kvcm.StorageConfig, data: st.DataObject
) -> None:
    storage = kvcm.Storage(config)
    for level in range(storage.layout.num_levels):
        storage.wait_usable(level)
    groups, pools = oracle.layer_groups(config), oracle.pool_groups(config)
    models = [Model(storage) for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 12))):
        model = data.draw(st.sampled_from(models))
        pages = model.pages
        history = data.draw(st.integers(pages.history_length, max(pages.capacity, 0)))
        if pages.has_scratch_slots:
            assert config.swa_scratch_reuse is not None
            low = pages.capacity - config.swa_scratch_reuse.max_rewind_len
            history = max(history, low, 0)
        if data.draw(st.integers(0, 9)) == 0:
            pages.drop_step()
        else:
            pages.resize(history + data.draw(st.integers(0, 90)), history)
        model.check(config, groups)
        for level in range(storage.layout.num_levels):
            for stats in storage.get_storage_statistics(level):
                home = pools[stats.pool_group]
                used = 0 if home.is_cold else sum(m.used(home) for m in models)
                assert (stats.unavailable, stats.draining) == (used, 0)
                assert stats.total == stats.free + used
    for model in models:
        model.pages.close()
    for level in range(storage.layout.num_levels):
        assert all(s.free == s.total for s in storage.get_storage_statistics(level))


@settings(max_examples=40)
@given(configs(with_host=False), st.data())
def test_no_two_pages_have_a_byte_in_common(
    config: kvcm.StorageConfig, data: st.DataObject
) -> None:
    """Every page of every buffer written through its indices, then read back."""
    storage = kvcm.Storage(config)
    tokens = config.tokens_per_block
    requests = [storage.create_request_pages() for _ in range(2)]
    for request in requests:
        request.resize(data.draw(st.integers(0, 12 * tokens)), 0)
    for layer in config.layers:  # one layer at a time: that is what scratch is for
        written = []
        for buffer in layer.buffers:
            converter = storage.get_page_index_converter(layer.layer_id, buffer.role, PER_LAYER)
            place = storage.layout.place(layer.layer_id, buffer.role)
            memory = storage.pool_memory(place.pool_group, place.pool).reshape(-1)
            for number, request in enumerate(requests):
                indices = converter.convert(
                    request.get_base_page_indices(place.layer_group),
                    request.get_swa_scratch_range(place.layer_group),
                    request.get_scratch_slots(place.layer_group),
                )
                assert (indices >= 0).all()
                for i, index in enumerate(indices):
                    begin = int(index) * buffer.page_bytes
                    value = (len(written) * 37 + number * 101 + i + 1) % 251
                    memory[begin : begin + buffer.page_bytes] = value
                    written.append((memory, begin, buffer.page_bytes, value))
        for memory, begin, size, value in written:
            assert (memory[begin : begin + size] == value).all()


def test_shared_tables_serve_every_layer_through_its_address() -> None:
    storage = kvcm.Storage(make_config([dense_layer(i, 64) for i in range(3)]))
    request = storage.create_request_pages()
    assert request.resize(20, 0)
    table = request.get_base_page_indices(0)
    for layer in range(3):
        addresses = []
        for mode in kvcm.PageIndexMode:
            indices = storage.get_page_index_converter(layer, "KEY", mode).convert(table)
            base = storage.get_mem_pool_base_address(layer, "KEY", mode)
            addresses.append(
                base + indices.astype(np.int64) * storage.get_page_stride(layer, "KEY")
            )
        np.testing.assert_array_equal(*addresses)
        assert storage.get_page_index_upper_bound(layer, "KEY") > indices.max()


def test_a_tier_resized_keeps_contents_and_addresses() -> None:
    config = make_config([dense_layer(0, MIB)], cache_tiers=[gpu_tier(16 * MIB, 64 * MIB)])
    storage = kvcm.Storage(config)
    request = storage.create_request_pages()
    assert request.resize(4 * 10, 0)
    memory = storage.pool_memory(0, 0)
    address = memory.ctypes.data
    memory[:10] = np.arange(10, dtype=np.uint8)[:, None]
    for quota in (64 * MIB, 4 * MIB, 32 * MIB, 1):
        storage.resize(0, quota)
        assert storage.pool_memory(0, 0).ctypes.data == address
        assert (memory[:10] == np.arange(10)[:, None]).all()
    assert storage.get_num_bytes(0) == 10 * MIB
    assert storage.get_storage_statistics(0)[0].draining == 10 - storage.get_quota(0) // MIB
    request.close()
    storage.trim()
    assert storage.get_num_bytes(0) == storage.get_quota(0)


def test_host_pools_fill_behind_the_caller_s_back() -> None:
    layer = kvcm.LayerConfig(0, [kvcm.BufferConfig("KEY", 4096, is_sparse=True)])
    config = make_config(
        [layer, dense_layer(1, 64)],
        cache_tiers=[gpu_tier(MIB), host_tier(64 * MIB)],
        selection_groups=[kvcm.SelectionGroupConfig([0], 4, kvcm.UnitLayout([1024]))],
    )
    storage = kvcm.Storage(config)
    storage.wait_usable(1)
    sparse = storage.get_storage_statistics(1)[0]
    assert sparse.free == sparse.total > 1000
    assert (
        storage.pool_group_descs()[sparse.pool_group][0].storage_medium == kvcm.CacheTier.HOST_MEM
    )
    assert kvcm.sparse_backing_medium() == kvcm.CacheTier.HOST_MEM


@given(configs(), st.integers(1, 4), st.integers(0, 900))
def test_clamp_is_the_longest_length_that_fits(
    config: kvcm.StorageConfig, batch_size: int, upper: int
) -> None:
    layout = kvcm.StorageLayout(config)
    totals = [0] * len(layout.pool_groups)
    for level in range(layout.num_levels):
        slots = layout.slots_for_quota(level, 1)
        totals = [max(a, b) for a, b in zip(totals, slots, strict=True)]
    totals = [min(t, 40) for t in totals]
    groups, pools = oracle.layer_groups(config), oracle.pool_groups(config)
    tokens = config.tokens_per_block

    batches = [*config.constraints, *([config.typical_step] if config.typical_step else [])]
    step = max([1, *(r.capacity - r.history_length for b in batches for r in b.kv_caches)])
    step = -(-step // tokens) * tokens if step > 1 else 1

    def peaks(group: oracle.Group) -> list[int]:
        """The most slots on the way to each length: step by step, and decoding."""
        most = [0]
        for length in range(1, upper + 1):
            request = kvcm.KvCacheDesc(length, (length - 1) // step * step)
            prefill = oracle.count_pages(config, group, kvcm.BatchDesc([request]))
            decode = kvcm.most_pages(kvcm.LifeCycle(group.window, group.sinks), tokens, length)
            most.append(max(most[-1], prefill, decode))
        return most

    most = [peaks(group) for group in groups]

    def fits(length: int) -> bool:
        return all(
            sum(batch_size - 1 + most[i][length] for i in p.groups)
            <= total * config.max_util_for_resume
            for p, total in zip(pools, totals, strict=True)
            if not p.is_cold
        )

    best = max((n for n in range(upper + 1) if fits(n)), default=0)
    assert layout.clamp_max_seq_len(totals, batch_size, upper) == best


def test_arrays_of_a_pool_keep_its_memory() -> None:
    storage = kvcm.Storage(make_config([dense_layer(0, MIB)]))
    memory = storage.pool_memory(0, 0)
    del storage
    memory[:] = 7
    assert (memory == 7).all()


def test_a_request_keeps_its_storage() -> None:
    request = kvcm.Storage(make_config([dense_layer(0, MIB)])).create_request_pages()
    assert request.resize(10, 0)
    assert len(request.get_base_page_indices(0)) == 3


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
def test_rows_are_filled_up_with_minus_one(length: int) -> None:
    storage = kvcm.Storage(make_config([dense_layer(0, 64)]))
    request = storage.create_request_pages()
    assert request.resize(length, 0)
    row = np.full(4, -777, np.int32)
    request.copy_base_page_indices(0, row)
    assert (row[-(-length // 4) :] == -1).all()
    assert (row[: -(-length // 4)] >= 0).all()


@pytest.mark.parametrize("name", ["ScratchDesc", "get_scratch_desc", "enter_decode", "is_decoding"])
def test_names_that_went_before_the_scratch_calls_are_gone(name: str) -> None:
    for owner in (kvcm, kvcm.Storage, kvcm.RequestPages, kvcm.KvCache):
        assert not hasattr(owner, name)
