"""Windows, conversions, grouping and ratios against restatements of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_kvcm as kvcm
import storage_oracle as oracle
from storage_configs import MIB, batches, configs, dense_layer, make_config

LENGTHS = st.integers(0, 5000)
WINDOWS = st.none() | st.integers(1, 300)
TOKENS = st.sampled_from([1, 2, 3, 4, 16, 64, 256])


@given(WINDOWS, st.integers(0, 200), TOKENS, LENGTHS)
def test_stale_pages_follow_the_formula(
    window: int | None, sinks: int, tokens: int, history: int
) -> None:
    sinks = 0 if window is None else sinks
    got = kvcm.stale_pages(kvcm.LifeCycle(window, sinks), tokens, history)
    want = oracle.stale(window, sinks, tokens, history)
    assert (got.end - got.begin, list(want)[:1]) == (len(want), [got.begin] if want else [])


@given(WINDOWS, st.integers(0, 200), TOKENS, LENGTHS, LENGTHS, st.integers(0, 100))
def test_scratch_pages_follow_the_formula(
    window: int | None, sinks: int, tokens: int, history: int, more: int, rewind: int
) -> None:
    sinks = 0 if window is None else sinks
    life_cycle = kvcm.LifeCycle(window, sinks)
    got = kvcm.scratch_pages(life_cycle, tokens, history, history + more, rewind)
    want = oracle.scratch(window, sinks, tokens, history, history + more, rewind)
    assert list(range(got.begin, got.end)) == want


@given(st.integers(1, 300), st.integers(0, 60), TOKENS, st.integers(1, 400))
def test_most_pages_is_the_peak_of_decoding(
    window: int, sinks: int, tokens: int, length: int
) -> None:
    peak = max(
        -(-n // tokens) - len(oracle.stale(window, sinks, tokens, n - 1))
        for n in range(1, length + 1)
    )
    assert kvcm.most_pages(kvcm.LifeCycle(window, sinks), tokens, length) == peak


@given(
    st.lists(st.integers(-1, 1 << 20), max_size=40),
    st.integers(1, 60),
    st.integers(1, 8),
    st.data(),
    st.sampled_from(list(kvcm.PageIndexMode)),
)
def test_conversion_is_bit_exact(
    base: list[int], scale: int, expansion: int, data: st.DataObject, mode: kvcm.PageIndexMode
) -> None:
    position = data.draw(st.integers(0, scale - 1))
    converter = kvcm.PageIndexConverter(
        scale=scale, expansion=expansion, position=position, mode=mode
    )
    pages = np.array(base, np.int32)
    got = converter.convert(pages)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, oracle.convert(pages, scale, expansion, position, mode))
    assert [converter.base_index_of(int(i)) for i in got] == list(np.repeat(pages, expansion))


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.data())
def test_scratch_substitution_is_bit_exact(
    layers: int, per_layer: int, expansion: int, data: st.DataObject
) -> None:
    scale = layers * per_layer
    position = data.draw(st.integers(0, scale - 1))
    table = np.array(data.draw(st.lists(st.integers(-1, 1000), min_size=1, max_size=40)), np.int32)
    begin = data.draw(st.integers(0, len(table)))
    end = data.draw(st.integers(begin, len(table)))
    converter = kvcm.PageIndexConverter(
        scale=scale, expansion=expansion, position=position, scratch_pages_per_page=per_layer
    )
    slots = np.arange(500, 500 + converter.scratch_slots(end - begin), dtype=np.int32)
    assert len(slots) == -(-(end - begin) * per_layer // scale)
    mode = kvcm.PageIndexMode.PER_LAYER
    want = oracle.convert(table, scale, expansion, position, mode).reshape(-1, expansion)
    for page in range(begin, end):
        t = (page - begin) * per_layer
        index = slots[t // scale] * scale + (t % scale + position) % scale
        want[page] = index * expansion + np.arange(expansion)
    got = converter.convert(table, kvcm.PageRange(begin, end), slots)
    np.testing.assert_array_equal(got, want.reshape(-1))


@given(configs())
def test_grouping_follows_the_rules(config: kvcm.StorageConfig) -> None:
    layout = kvcm.StorageLayout(config)
    groups = oracle.layer_groups(config)
    assert [
        [(c.buffer_bytes, tuple((b.layer_id, b.role) for b in c.buffers)) for c in group.slot]
        for group in layout.layer_groups
    ] == [[(c.buffer_bytes, c.buffers) for c in group.slot] for group in groups]
    assert [
        (p.level, p.is_sparse, p.is_cold, tuple(p.slot_bytes), tuple(p.layer_groups))
        for p in layout.pool_groups
    ] == [
        (p.level, p.is_sparse, p.is_cold, p.slot_bytes, p.groups)
        for p in oracle.pool_groups(config)
    ]


@given(configs())
def test_places_tile_their_slots(config: kvcm.StorageConfig) -> None:
    layout = kvcm.StorageLayout(config)
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for buffer in layout.all_buffer_ids():
        place = layout.place(buffer.layer_id, buffer.role)
        assert place.layer_group == layout.get_layer_group_id(buffer.layer_id)
        assert place.pool_group == layout.layer_groups[place.layer_group].pool_group
        if place.is_sparse:
            members = [group.layers for group in config.selection_groups]
            assert buffer.layer_id in members[place.pool]
            continue
        size = place.page_bytes * place.converter.expansion
        pieces.setdefault((place.layer_group, place.pool), []).append((place.offset_bytes, size))
    for (group, pool), found in pieces.items():
        end = 0
        for offset, size in sorted(found):
            assert offset == end
            end += size
        assert end == layout.pool_groups[layout.layer_groups[group].pool_group].slot_bytes[pool]


@given(configs(), batches())
def test_slots_of_a_batch_follow_the_formula(
    config: kvcm.StorageConfig, batch: kvcm.BatchDesc
) -> None:
    groups = oracle.layer_groups(config)
    assert kvcm.StorageLayout(config).count_slots(batch) == [
        sum(oracle.count_pages(config, groups[i], batch) for i in pools.groups)
        for pools in oracle.pool_groups(config)
    ]


@given(configs())
def test_floors_and_ratios_follow_the_formulas(config: kvcm.StorageConfig) -> None:
    layout = kvcm.StorageLayout(config)
    assert layout.min_slots() == oracle.min_slots(config)
    np.testing.assert_allclose(layout.pool_ratio(), oracle.pool_ratio(config), rtol=1e-12)


@given(configs(), st.integers(1, 96 * MIB))
def test_slots_are_a_fair_share_of_the_quota(config: kvcm.StorageConfig, quota: int) -> None:
    """Within the quota, at the floor or near the share, and no slot more fits."""
    layout = kvcm.StorageLayout(config)
    pools = oracle.pool_groups(config)
    for level in range(layout.num_levels):
        size = oracle.granule(config.cache_tiers[level].quota)
        assert layout.granule_bytes(level) == size
        homes = [g for g, p in enumerate(pools) if p.level == level]
        least = [
            oracle.granules_for(pools[g].slot_bytes, layout.min_slots()[g], size) for g in homes
        ]
        assert layout.min_quota(level) == sum(least) * size
        total = max(sum(least), -(-quota // size))
        assert layout.effective_quota(level, quota) == total * size
        slots = layout.slots_for_quota(level, quota)
        assert all(slots[g] == 0 for g in range(len(pools)) if g not in homes)
        used = [oracle.granules_for(pools[g].slot_bytes, slots[g], size) for g in homes]
        assert sum(used) <= total
        assert all(slots[g] >= layout.min_slots()[g] for g in homes)
        for g, granules in zip(homes, used, strict=True):
            assert oracle.granules_for(pools[g].slot_bytes, slots[g] + 1, size) > granules
            assert layout.get_num_bytes(g, slots[g]) == granules * size
        if len(homes) == 1 and len(pools[homes[0]].slot_bytes) == 1:
            assert used == [total]


@given(configs(), st.integers(1, 96 * MIB))
def test_slots_are_dealt_as_the_rules_say(config: kvcm.StorageConfig, quota: int) -> None:
    layout = kvcm.StorageLayout(config)
    for level in range(layout.num_levels):
        want = oracle.slots_for_quota(config, layout.pool_ratio(), level, quota)
        assert layout.slots_for_quota(level, quota) == want


def dealt(ratio: list[float], quota: int) -> list[int]:
    """Slots of three pool groups, whose slots are 1, 1/2 and 1/4 granules."""
    windows = [None, 8, 16]
    layers = [dense_layer(i, 2 * MIB >> i, window) for i, window in enumerate(windows)]
    tiers = [kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, quota)]
    config = make_config(layers, cache_tiers=tiers, initial_pool_ratio=ratio)
    return kvcm.StorageLayout(config).slots_for_quota(0, quota)


def test_granules_are_dealt_lightest_first() -> None:
    # 50 granules: 7.5 are 8 of them, then 42 * 0.25 / 0.85 are 12, which leaves 30.
    assert dealt([0.6, 0.25, 0.15], 100 * MIB) == [30, 12 * 2, 8 * 4]


def test_who_gets_too_little_is_set_to_the_floor_and_leaves_the_deal() -> None:
    # The first group's floor is 6 slots: the 5 of the widest window, with headroom. Of 32 granules
    # it gets 6 instead of 3; the others share 26 by 0.25 : 0.65, 7 and 19.
    assert dealt([0.1, 0.25, 0.65], 64 * MIB) == [6, 7 * 2, 19 * 4]


def test_a_pool_group_alone_has_the_whole_tier() -> None:
    config = make_config([dense_layer(0, 2 * MIB)], initial_pool_ratio=[1.0])
    assert kvcm.StorageLayout(config).slots_for_quota(0, 64 * MIB) == [32]


@pytest.mark.parametrize(
    ("num_layers", "num_pages", "slots"), [(14, 64, 5), (13, 64, 5), (6, 32, 6), (7, 7, 1)]
)
def test_scratch_pages_of_a_group_share_slots(num_layers: int, num_pages: int, slots: int) -> None:
    config = make_config(
        [dense_layer(i, 64, 8) for i in range(num_layers)],
        swa_scratch_reuse=kvcm.SwaScratchReuseConfig(),
    )
    storage = kvcm.Storage(config)
    request = storage.create_request_pages()
    # So many pages are stale when the step ends; the query behind it reads the last 8 tokens.
    assert request.resize(num_pages * 4 + 7, 0)
    assert request.get_swa_scratch_range(0) == kvcm.PageRange(0, num_pages)
    assert len(request.get_scratch_slots(0)) == slots
    table = request.get_base_page_indices(0)
    assert (table[:num_pages] == -1).all()
    assert (table[num_pages:] >= 0).all()
    indices = {
        int(i)
        for layer in range(num_layers)
        for i in storage.get_page_index_converter(
            layer, "KEY", kvcm.PageIndexMode.PER_LAYER
        ).convert(table, request.get_swa_scratch_range(0), request.get_scratch_slots(0))
    }
    places = {
        slot * num_layers + p for slot in request.get_scratch_slots(0) for p in range(num_layers)
    }
    own = {int(b) * num_layers + p for b in table[num_pages:] for p in range(num_layers)}
    assert indices <= places | own
