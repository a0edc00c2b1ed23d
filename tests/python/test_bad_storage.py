"""What storage refuses, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from storage_configs import MIB, dense_layer, gpu_tier, host_tier, make_config

SPARSE = kvcm.BufferConfig("KEY", 64, is_sparse=True)
GROUP = kvcm.SelectionGroupConfig([0], 4, kvcm.UnitLayout([16]))
BOTH_TIERS = [gpu_tier(MIB), host_tier(MIB)]


def layer(*buffers: kvcm.BufferConfig, **more: Any) -> kvcm.LayerConfig:
    return kvcm.LayerConfig(0, list(buffers), **more)


def sparse_config(**changes: Any) -> kvcm.StorageConfig:
    fields: dict[str, Any] = {
        "layers": [layer(SPARSE)],
        "cache_tiers": BOTH_TIERS,
        "selection_groups": [GROUP],
    }
    return make_config(**(fields | changes))


def batch(capacity: int, history: int, shared: int = 0) -> kvcm.BatchDesc:
    return kvcm.BatchDesc([kvcm.KvCacheDesc(capacity, history)], shared)


def one(**changes: Any) -> kvcm.StorageConfig:
    return make_config([dense_layer(0, 64)], **changes)


Case = tuple[Callable[[], Any], list[str]]
CONFIG_CASES: list[Case] = [
    (lambda: one(tokens_per_block=0), ["tokens_per_block", "[1, 65536]", "got 0"]),
    (lambda: one(tokens_per_block=None), ["tokens_per_block must be an int", "got None"]),
    (lambda: one(tokens_per_unit=3), ["tokens_per_unit", "divide", "got 3"]),
    (lambda: one(cache_tiers=[]), ["cache_tiers", "1 or 2", "got 0"]),
    (lambda: one(cache_tiers=[gpu_tier(1)] * 3), ["cache_tiers", "1 or 2", "got 3"]),
    (lambda: one(cache_tiers=[host_tier(1)]), ["cache_tiers[0].tier", "GPU_MEM", "got HOST_MEM"]),
    (lambda: one(cache_tiers=[gpu_tier(1)] * 2), ["cache_tiers[1].tier", "HOST_MEM"]),
    (lambda: one(cache_tiers=[gpu_tier(0)]), ["cache_tiers[0].quota", "got 0"]),
    (lambda: one(cache_tiers=[gpu_tier(9, 8)]), ["cache_tiers[0].max_quota", "[9, ", "got 8"]),
    (lambda: one(cache_tiers=[7]), ["cache_tiers[0] must be a CacheTierConfig", "got int 7"]),
    (lambda: one(max_host_pages=0), ["max_host_pages", "[1, 2147483647]", "got 0"]),
    (lambda: one(max_host_pages="1"), ["max_host_pages must be an int", "got str"]),
    (lambda: make_config([]), ["layers", "empty"]),
    (lambda: make_config([dense_layer(-1, 64)]), ["layers[0].layer_id", "got -1"]),
    (lambda: make_config([dense_layer(5, 64)] * 2), ["layers[1].layer_id 5", "taken"]),
    (lambda: make_config([layer()]), ["layers[0].buffers", "empty"]),
    (lambda: make_config([dense_layer(0, 0)]), ["layers[0].buffers[0].page_bytes", "got 0"]),
    (lambda: make_config([dense_layer(0, 2**41)]), ["page_bytes", "got 2199023255552"]),
    (lambda: make_config([layer(kvcm.BufferConfig("", 64))]), ["buffers[0].role", "empty"]),
    (
        lambda: make_config([layer(kvcm.BufferConfig("K", 64), kvcm.BufferConfig("K", 32))]),
        ['layers[0].buffers[1].role "K"', "taken"],
    ),
    (
        lambda: make_config([layer(kvcm.BufferConfig("K", 64, 3))]),
        ["tokens_per_block_override", "divide tokens_per_block 4", "got 3"],
    ),
    (
        lambda: make_config([layer(kvcm.BufferConfig("K", 64, 8))]),
        ["tokens_per_block_override", "[1, 4]", "got 8"],
    ),
    (lambda: make_config([dense_layer(0, 64, 0)]), ["sliding_window_size", "got 0"]),
    (lambda: make_config([dense_layer(0, 64, None, 4)]), ["num_sink_tokens", "needs", "got 4"]),
    (lambda: make_config([dense_layer(0, 64, 8, -1)]), ["num_sink_tokens", "got -1"]),
    (
        lambda: sparse_config(layers=[layer(SPARSE, kvcm.BufferConfig("V", 64))]),
        ["layers[0].buffers[1].is_sparse", "sparse or dense as a whole"],
    ),
    (
        lambda: sparse_config(layers=[layer(kvcm.BufferConfig("V", 64), SPARSE)]),
        ["layers[0].buffers[1].is_sparse", "sparse or dense as a whole"],
    ),
    (
        lambda: sparse_config(cache_tiers=[gpu_tier(MIB)]),
        ["layers[0].buffers[0].is_sparse", "HOST_MEM", "cache_tiers"],
    ),
    (
        lambda: sparse_config(layers=[layer(SPARSE, sliding_window_size=8)]),
        ["layers[0].sliding_window_size", "sparse", "got 8"],
    ),
    (lambda: sparse_config(selection_groups=[]), ["selection_groups", "layer 0"]),
    (lambda: sparse_config(selection_groups=[GROUP] * 2), ["selection_groups[1].layers", "got 0"]),
    (
        lambda: one(selection_groups=[GROUP]),
        ["selection_groups[0].layers", "sparse layers", "got 0"],
    ),
    (
        lambda: sparse_config(
            selection_groups=[kvcm.SelectionGroupConfig([0], 4, kvcm.UnitLayout([20]))]
        ),
        ["buffers of layer 0", "selection_groups[0]", "80 bytes per page"],
    ),
    (
        lambda: sparse_config(
            selection_groups=[kvcm.SelectionGroupConfig([0], 0, kvcm.UnitLayout([16]))]
        ),
        ["selection_groups[0].top_k", "got 0"],
    ),
    (lambda: one(max_util_for_resume=0), ["max_util_for_resume", "[0.001, 1]", "got 0"]),
    (lambda: one(max_util_for_resume=1.25), ["max_util_for_resume", "[0.001, 1]", "got 1.25"]),
    (lambda: one(max_util_for_resume=1e-12), ["max_util_for_resume", "[0.001, 1]", "got 1e-12"]),
    (lambda: one(max_util_for_resume="x"), ["max_util_for_resume must be a finite number"]),
    (lambda: one(max_util_for_resume=float("nan")), ["max_util_for_resume", "got float nan"]),
    (lambda: one(constraints=[batch(3, 4)]), ["constraints[0].kv_caches[0]", "[0, capacity 3]"]),
    (lambda: one(constraints=[kvcm.BatchDesc([])]), ["constraints[0].kv_caches", "empty"]),
    (lambda: one(typical_step=batch(4, -1)), ["typical_step.kv_caches[0]", "got -1"]),
    (lambda: one(typical_step=batch(4, 3, -2)), ["typical_step.system_prompt_length", "got -2"]),
    (lambda: one(typical_step=5), ["typical_step must be a BatchDesc", "got int 5"]),
    (lambda: one(suspended=[]), ["suspended must be a BatchDesc", "got list []"]),
    (
        lambda: one(suspended=kvcm.BatchDesc([kvcm.KvCacheDesc(1, 2)])),
        ["suspended.kv_caches[0].history_length", "[0, capacity 1]", "got 2"],
    ),
    (lambda: one(initial_pool_ratio=[0.5]), ["initial_pool_ratio", "sum to 1", "got 0.5"]),
    (lambda: one(initial_pool_ratio=[0.0]), ["initial_pool_ratio[0]", "(0, 1]", "got 0"]),
    (
        lambda: kvcm.StorageLayout(one(initial_pool_ratio=[0.5, 0.5])),
        ["initial_pool_ratio", "one weight per pool group, 1", "got 2"],
    ),
    (
        lambda: one(swa_scratch_reuse=kvcm.SwaScratchReuseConfig(-1)),
        ["swa_scratch_reuse.max_rewind_len", "got -1"],
    ),
    (lambda: one(enable_stats=1), ["enable_stats must be a bool", "got int 1"]),
    (lambda: one(device="gpu"), ["device", 'got "gpu"']),
]


@pytest.mark.parametrize(("call", "text"), CONFIG_CASES)
def test_config_refuses_a_field_by_name(call: Callable[[], Any], text: list[str]) -> None:
    with pytest.raises(kvcm.InvalidArgument) as caught:
        call()
    missing = [fragment for fragment in text if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_a_config_at_its_limits_is_taken() -> None:
    one(tokens_per_block=1)
    one(max_util_for_resume=1)
    make_config([dense_layer(0, 64, 1, 0)])
    # One buffer of the whole page, or one per region.
    regions = kvcm.UnitLayout([16, 8])
    whole = kvcm.BufferConfig("KEY", 24 * 4, is_sparse=True)
    parts = [kvcm.BufferConfig("K", 64, is_sparse=True), kvcm.BufferConfig("S", 32, is_sparse=True)]
    for buffers in ([whole], parts):
        group = kvcm.SelectionGroupConfig([0], 4, regions)
        sparse_config(layers=[layer(*buffers)], selection_groups=[group])


STORAGE = kvcm.Storage(
    make_config(
        [layer(SPARSE), dense_layer(1, 64), dense_layer(2, 64, 8)],
        cache_tiers=BOTH_TIERS,
        selection_groups=[GROUP],
        swa_scratch_reuse=kvcm.SwaScratchReuseConfig(),
    )
)
REQUEST = STORAGE.create_request_pages()
CONVERTER = kvcm.PageIndexConverter(scale=3)
SHARED, PER_LAYER = kvcm.PageIndexMode.SHARED, kvcm.PageIndexMode.PER_LAYER
CALL_CASES: list[Case] = [
    (lambda: STORAGE.get_page_stride(9, "KEY"), ["layer_id", "got 9"]),
    (lambda: STORAGE.get_page_stride(1, "VALUE"), ["role", "layer 1", 'got "VALUE"']),
    (lambda: STORAGE.is_sparse(0, "VALUE"), ["role", 'got "VALUE"']),
    (
        lambda: STORAGE.get_page_index_converter(0, "KEY", PER_LAYER),
        ["[Storage.get_page_index_converter]", "layer 0", "sparse", "host memory", "fetch"],
    ),
    (lambda: STORAGE.get_mem_pool_base_address(0, "KEY", SHARED), ["layer 0", "sparse"]),
    (lambda: STORAGE.get_page_index_scale(0, "KEY"), ["layer 0", "sparse"]),
    (lambda: STORAGE.get_page_index_upper_bound(0, "KEY"), ["layer 0", "sparse"]),
    (
        lambda: STORAGE.get_page_index_converter(2, "KEY", SHARED),
        ["mode must be PER_LAYER", "layer 2", "got SHARED"],
    ),
    (lambda: STORAGE.get_page_index_converter(1, "KEY", 0), ["mode must be a PageIndexMode"]),
    (lambda: STORAGE.get_storage_statistics(2), ["level", "[0, 2)", "got 2"]),
    (lambda: STORAGE.get_quota(-1), ["level", "got -1"]),
    (lambda: STORAGE.resize(0, 0), ["[Storage.resize] quota", "got 0"]),
    (lambda: STORAGE.resize(0, 1 << 50), ["[Storage.resize] quota", "max_quota"]),
    (lambda: STORAGE.pool_memory(9, 0), ["pool_group", "got 9"]),
    (lambda: STORAGE.create_request_pages(-1), ["expected_length", "got -1"]),
    (lambda: STORAGE.layout.clamp_max_seq_len([], 1, 9), ["totals", "pool group", "got 0"]),
    (lambda: STORAGE.layout.effective_quota(0, 0), ["quota", "[1, ", "got 0"]),
    (lambda: STORAGE.get_quota(2**31), ["level must be an int of 32 bits, got 2147483648"]),
    (lambda: STORAGE.get_quota(-(2**31)), ["level must be in [0, ", "got -2147483648"]),
    (lambda: STORAGE.resize(0, -(2**80)), ["quota must be an int of 64 bits, got -12089258196146"]),
    (lambda: STORAGE.layout.slots_for_quota(0, 2**63 - 1), ["quota", "got 9223372036854775807"]),
    (lambda: CONVERTER.convert(np.array([-2], np.int32)), ["base ind", "[0, 715827882)", "got -2"]),
    (lambda: CONVERTER.convert(np.array([715827882], np.int32)), ["base ind", "got 715827882"]),
    (lambda: STORAGE.clamp_max_seq_len_for_mem(0, 5), ["batch_size", "got 0"]),
    (lambda: STORAGE.clamp_max_seq_len_for_mem(1, -5), ["upper", "got -5"]),
    (lambda: kvcm.Storage(None), ["[Storage] config must be a StorageConfig", "got None"]),
    (lambda: kvcm.Storage(one(), None), ["[Storage] fill must be a StorageFill", "got None"]),
    (lambda: kvcm.Storage(one(), progress=print), ["[Storage] progress needs fill", "AT_ONCE"]),
    (
        lambda: kvcm.Storage(one(), kvcm.StorageFill.AT_ONCE, 3),
        ["[Storage] progress must be callable or None", "got int 3"],
    ),
    (lambda: REQUEST.resize(3, 4), ["[RequestPages.resize] history_length", "got 4"]),
    (lambda: REQUEST.resize("3", 4), ["capacity must be an int", "got str '3'"]),
    (lambda: REQUEST.get_base_page_indices(3), ["layer_group", "[0, 3)", "got 3"]),
    (lambda: REQUEST.copy_base_page_indices(0, [1]), ["out"]),
    (lambda: CONVERTER.convert(np.zeros(3, np.int64)), ["base", "int32"]),
    (
        lambda: CONVERTER.convert(np.zeros(3, np.int32), kvcm.PageRange(0, 4)),
        ["scratch pages", "table's 3", "[0, 4)"],
    ),
    (
        lambda: CONVERTER.convert(np.zeros(3, np.int32), kvcm.PageRange(0, 3)),
        ["scratch slots", ">= 1", "got 0"],
    ),
    (lambda: kvcm.PageIndexConverter(scale=0), ["scale", "got 0"]),
    (lambda: kvcm.PageIndexConverter(scale=3, position=3), ["position", "[0, 2]", "got 3"]),
    (lambda: kvcm.stale_pages(kvcm.LifeCycle(), 0, 3), ["tokens_per_block", "got 0"]),
    (lambda: kvcm.stale_pages(None, 4, 3), ["life_cycle must be a LifeCycle", "got None"]),
    (lambda: kvcm.scratch_pages(kvcm.LifeCycle(4), 4, 5, 3), ["capacity", "[5, ", "got 3"]),
]


@pytest.mark.parametrize(("call", "text"), CALL_CASES)
def test_call_refuses_an_argument_by_name(call: Callable[[], Any], text: list[str]) -> None:
    with pytest.raises(kvcm.InvalidArgument) as caught:
        call()
    missing = [fragment for fragment in text if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_a_tier_larger_than_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        kvcm.Storage(make_config([dense_layer(0, 1 << 30)], cache_tiers=[gpu_tier(1 << 60)]))
