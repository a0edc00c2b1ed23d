"""Random storage configurations, and the geometries of real models."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import sparse_kvcm as kvcm

MIB = 1 << 20
ROLES = ("KEY", "VALUE", "SCALE")


def gpu_tier(quota: int, max_quota: int = 0) -> kvcm.CacheTierConfig:
    return kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, quota, max_quota)


def host_tier(quota: int, max_quota: int = 0) -> kvcm.CacheTierConfig:
    return kvcm.CacheTierConfig(kvcm.CacheTier.HOST_MEM, quota, max_quota)


def dense_layer(
    layer_id: int, page_bytes: int, window: int | None = None, sinks: int | None = None
) -> kvcm.LayerConfig:
    return kvcm.LayerConfig(layer_id, [kvcm.BufferConfig("KEY", page_bytes)], window, sinks)


def make_config(layers: list[kvcm.LayerConfig], **changes: Any) -> kvcm.StorageConfig:
    """Pages of 4 tokens in 8 MiB."""
    fields: dict[str, Any] = {
        "cache_tiers": [gpu_tier(8 * MIB)],
        "layers": layers,
        "tokens_per_block": 4,
    }
    return kvcm.StorageConfig(**(fields | changes))


@st.composite
def dense_layers(draw: st.DrawFn, layer_id: int, tokens_per_block: int) -> kvcm.LayerConfig:
    overrides = [t for t in range(1, tokens_per_block + 1) if tokens_per_block % t == 0]
    buffers = [
        kvcm.BufferConfig(
            role,
            draw(st.sampled_from([16, 32, 48, 64, 128])),
            draw(st.none() | st.sampled_from(overrides)),
        )
        for role in draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=3, unique=True))
    ]
    window = draw(st.none() | st.sampled_from([1, 4, 8, 13]))
    sinks = None if window is None else draw(st.none() | st.sampled_from([0, 1, 5]))
    return kvcm.LayerConfig(layer_id, buffers, window, sinks)


@st.composite
def batches(draw: st.DrawFn) -> kvcm.BatchDesc:
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        capacity = draw(st.integers(0, 200))
        requests.append(kvcm.KvCacheDesc(capacity, draw(st.integers(0, capacity))))
    return kvcm.BatchDesc(requests, draw(st.sampled_from([0, 0, 7, 40])))


@st.composite
def configs(draw: st.DrawFn, with_host: bool = True) -> kvcm.StorageConfig:
    """Up to 7 dense layers, perhaps sparse ones, in tiers of a few MiB."""
    tokens = draw(st.sampled_from([1, 2, 4, 6]))
    layers = [draw(dense_layers(i, tokens)) for i in range(draw(st.integers(1, 7)))]
    tiers = [gpu_tier(draw(st.integers(1, 64 * MIB)))]
    groups = []
    if with_host and draw(st.booleans()):
        tiers.append(host_tier(draw(st.integers(1, 64 * MIB))))
        next_id = 100
        for _ in range(draw(st.integers(0, 3))):
            regions = draw(st.lists(st.sampled_from([8, 12, 16, 36]), min_size=1, max_size=2))
            members = list(range(next_id, next_id + draw(st.integers(1, 3))))
            next_id += len(members)
            for member in members:
                buffers = [
                    kvcm.BufferConfig(f"R{i}", region * tokens, is_sparse=True)
                    for i, region in enumerate(regions)
                ]
                layers.append(kvcm.LayerConfig(member, buffers))
            groups.append(kvcm.SelectionGroupConfig(members, 4, kvcm.UnitLayout(regions)))
    return kvcm.StorageConfig(
        cache_tiers=tiers,
        layers=draw(st.permutations(layers)),
        selection_groups=groups,
        tokens_per_block=tokens,
        max_util_for_resume=draw(st.sampled_from([0.5, 0.9, 0.97, 1.0])),
        constraints=draw(st.lists(batches(), max_size=2)),
        typical_step=draw(st.none() | batches()),
        suspended=draw(st.none() | batches()),
        swa_scratch_reuse=draw(
            st.none() | st.builds(kvcm.SwaScratchReuseConfig, st.sampled_from([0, 3]))
        ),
    )
