"""Where the buffers of a DSA model lie: views without copies, pool mappings, bytes per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.dsa import DSACacheManager, DSACacheManagerV2, OffloadSizes, PageGeometry  # noqa: E402
from sparse_kvcm.dsa.pools import RolePool, representatives  # noqa: E402
from sparse_kvcm.models import load_geometry  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

SHARED = kvcm.PageIndexMode.SHARED


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
def test_a_view_begins_at_the_shared_address_and_ends_at_the_upper_bound(kv_dtype: Any) -> None:
    manager = DSACacheManager(cases.cache_config(kv_dtype=kv_dtype))
    storage = manager.storage
    for layer in range(6):
        view = manager.get_buffers(layer)
        assert view.data_ptr() == storage.get_mem_pool_base_address(layer, "KEY", SHARED)
        assert view.shape[0] == storage.get_page_index_upper_bound(layer, "KEY")
        assert view.stride(0) * view.element_size() == storage.get_page_stride(layer, "KEY")
    for layer in (0, 1, 4):
        keys = manager.get_indexer_k_cache_buffers(layer)
        address = storage.get_mem_pool_base_address(6 + layer, "INDEX_KEY", SHARED)
        assert keys.data_ptr() == address
        assert keys.dtype == torch.uint8
        assert keys.shape[1:] == (manager.config.page_tokens, 1, 132)
    assert manager.indexer_k_cache_page_scale == 3


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "elements"),
    [
        ("bf16", torch.bfloat16, 192),
        ("fp8", torch.float8_e4m3fn, 192),
        ("fp8_ds_mla", torch.uint8, 128 + 4 + 128),
        ("nvfp4", torch.uint8, 96),
        ("nvfp4_ds_mla", torch.uint8, 64 + 64 + 8),
    ],
)
def test_latents_are_seen_in_the_type_of_their_kernels(
    kv_dtype: Any, dtype: Any, elements: int
) -> None:
    for manager in cases.managers(kv_dtype=kv_dtype):
        page = manager.config.page_tokens
        assert manager.get_buffers(3).dtype == dtype
        assert manager.get_buffers(3).shape[1:] == (page, 1, elements)
        if kv_dtype == "nvfp4":
            assert manager.get_buffers(3, "KEY_BLOCK_SCALE").shape[1:] == (page, 1, 12)
        role: Any = "INDEX_KEY" if kv_dtype == "nvfp4" else "KEY_BLOCK_SCALE"
        with pytest.raises(kvcm.InvalidArgument, match="role must be KEY.*, the buffers of lat"):
            manager.get_buffers(3, role)


@pytest.mark.parametrize("kv_dtype", ["bf16", "nvfp4"])
def test_roles_of_an_arena_are_those_of_its_storage(kv_dtype: Any) -> None:
    manager = cases.managers(kv_dtype=kv_dtype)[1]
    arena = manager.manager.arena(3)
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.shape)
    begin = 0
    for role in manager.config.key_roles:
        view = manager.get_buffers(3, role).view(torch.uint8).flatten(1)
        assert view.data_ptr() == arena.ctypes.data + begin
        size = manager.manager.storage.layout.place(3, role).page_bytes
        assert manager.manager.storage.is_sparse(3, role)
        assert np.array_equal(view, arena[:, begin : begin + size])
        begin += size
    assert begin == arena.shape[1]
    wanted = manager.config.geometry.sparse_layers(manager.config.page_tokens, kv_dtype)
    layers = {one.layer_id: one for one in manager.manager.storage.config.layers}
    assert [layers[one.layer_id].buffers for one in wanted] == [one.buffers for one in wanted]


def test_the_primary_pool_has_every_layer_s_pages_by_slot() -> None:
    manager = DSACacheManager(cases.cache_config())
    pool = manager.get_unique_primary_pool()
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    for layer in range(6):
        pages = manager.get_buffers(layer).view(torch.uint8).flatten(1)
        assert torch.equal(pool[:, layer, 0], pages[:: pool.shape[1]])


def test_index_keys_are_kept_for_layers_that_own_an_indexer_alone() -> None:
    for manager in cases.managers():
        assert sorted(manager.index_keys.layers) == [0, 1, 4]
        for layer in (2, 3, 5):
            with pytest.raises(
                kvcm.InvalidArgument, match=f"one of 0, 1, 4; got {layer}, which shares that of"
            ):
                manager.get_indexer_k_cache_buffers(layer)
        with pytest.raises(kvcm.InvalidArgument, match="got 6, which the model does not have"):
            manager.get_indexer_k_cache_buffers(6)


@pytest.mark.parametrize(
    ("kv_dtype", "key", "scale"), [("fp8", 192, 0), ("nvfp4", 96, 12), ("fp8_ds_mla", 260, 0)]
)
def test_all_is_the_sum_of_roles_and_counts_owners_of_indexers(
    kv_dtype: Any, key: int, scale: int
) -> None:
    for manager in cases.managers(kv_dtype=kv_dtype):
        sizes = [manager.bytes_per_token(r) for r in ("KEY", "KEY_BLOCK_SCALE", "INDEX_KEY")]
        assert sizes == [6 * key, 6 * scale, 3 * 132]
        assert manager.bytes_per_token() == manager.bytes_per_token("ALL") == sum(sizes)
    resident = cases.managers(kv_dtype=kv_dtype)[0]
    layers = resident.storage.config.layers
    pages = sum(buffer.page_bytes for layer in layers for buffer in layer.buffers)
    assert resident.bytes_per_token() * resident.config.page_tokens == pages


def storage_of(layers: list[kvcm.LayerConfig]) -> kvcm.Storage:
    tier = kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, 8 * cases.MIB)
    return kvcm.Storage(kvcm.StorageConfig(cache_tiers=[tier], layers=layers, tokens_per_block=8))


def index_layer(
    layer: int, page: int = 8 * 132, window: int | None = None, tokens: int | None = None
) -> kvcm.LayerConfig:
    return kvcm.LayerConfig(layer, [kvcm.BufferConfig("INDEX_KEY", page, tokens)], window)


PAGE = PageGeometry(kvcm.UnitLayout([128, 4]), 8)


def test_the_representative_is_the_same_in_every_order_of_layers() -> None:
    layers = [index_layer(i) for i in range(3)]
    layers.append(kvcm.LayerConfig(9, [kvcm.BufferConfig("KEY", 64)]))
    for order in (layers, layers[::-1], layers[1:] + layers[:1]):
        chosen = representatives(storage_of(order).layout)
        assert {role: layer for (_, _, role), layer in chosen.items()} == {"INDEX_KEY": 0, "KEY": 9}


# Arguments of `index_layer`, in the order of the configuration, and the layers that are asked for.
@pytest.mark.parametrize(
    ("layers", "ids", "message"),
    [
        ([(1,), (0,)], [0, 1], "offset of layer 1 must be .*, got"),
        ([(0,), (1, 8 * 68)], [0, 1], "pool of layer 1 must be"),
        ([(0, 8 * 68), (1, 8 * 68)], [0, 1], "page_bytes of layer 0 must be 1056"),
        ([(0,), (1, 8 * 132, 16)], [0, 1], "layer group of layer 1 must be"),
        ([(0, 4 * 132, None, 4), (1, 4 * 132, None, 4)], [0, 1], "must be 1056, got 528"),
        ([(1,), (2,), (0,)], [1, 2], "representative layer must be 1, got 0"),
    ],
)
def test_a_pool_that_one_conversion_does_not_serve_is_refused(
    layers: list[Any], ids: list[int], message: str
) -> None:
    storage = storage_of([index_layer(*layer) for layer in layers])
    with pytest.raises(kvcm.InvalidArgument, match=message):
        RolePool(storage, "INDEX_KEY", dict(enumerate(ids)), PAGE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_dtype": "fp8_ds_mla", "tokens_per_block": 48},
            "must be 64 with kv_dtype fp8_ds_mla.* got 48; bf16, fp8 and nvfp4 take other",
        ),
        ({"max_seq_len": 5000}, r"max_seq_len must be in \[1, 4096\], what config takes, got 5000"),
        ({"max_batch_size": 0}, "max_batch_size must be an int in .*, got 0"),
        ({"gpu_quota": 0}, "gpu_quota must be an int >= 1, got 0"),
        (
            {"cold_quota": 5, "offload": OffloadSizes(16, 4)},
            "cold_quota must be 0 with offload, which has its own, got 5",
        ),
        (
            {"geometry": cases.geometry(kv_lora_rank=100), "kv_dtype": "nvfp4_ds_mla"},
            "got 'nvfp4_ds_mla', which takes multiples of 64: kv_lora_rank is 100; bf16 takes any",
        ),
        (
            {"geometry": cases.geometry(index_head_dim=32)},
            "got 'fp8', which takes multiples of 128: index_head_dim is 32; bf16 takes any",
        ),
        (  # scales would be read by the page indices of the data
            {
                "geometry": cases.geometry(kv_lora_rank=448),
                "kv_dtype": "nvfp4",
                "index_dtype": "bf16",
            },
            "keep KEY and INDEX_KEY in pages of two sizes .* nvfp4 and bf16, 2048 B each; take",
        ),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_with_what_can(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=message):
        DSACacheManager(cases.cache_config(**changes))


def test_a_selection_beyond_the_cached_slots_is_refused_with_the_least_number() -> None:
    config = cases.cache_config()
    with pytest.raises(
        kvcm.InvalidArgument, match="cached_slots must be at least 16, .* top-k 16, got 8"
    ):
        cases.cache_config(offload=cases.offload_sizes(config, cached_slots=8))
    for manager in cases.managers():
        manager.add_request(1, 100)
        manager.import_history(1, *cases.history(manager.config.geometry, 1, 0, 50))
        manager.prepare_step([StepRequest(1, 50)])
        with pytest.raises(kvcm.InvalidArgument, match="16"):
            manager.select(0, torch.zeros(1, 17, dtype=torch.int32))
        manager.abort_step()


def test_versions_take_what_they_are_for() -> None:
    config = cases.cache_config()
    offload = cases.cache_config(offload=cases.offload_sizes(config))
    with pytest.raises(kvcm.InvalidArgument, match="use_kv_cache_manager_v2=True gives"):
        DSACacheManager(offload)
    with pytest.raises(kvcm.InvalidArgument, match="cold_quota must be 0: .*, got 7;"):
        DSACacheManager(cases.cache_config(cold_quota=7))
    resident = DSACacheManagerV2(config)
    assert resident.manager.memory_use().host_bytes == 0
    assert resident.manager.storage.layout.num_levels == 1


def test_the_layer_maps_are_two() -> None:
    geometry = load_geometry("glm-5.2")
    groups = geometry.selection_group_of
    assert [groups[i] for i in (0, 1, 2, 5, 6, 77)] == [0, 1, 2, 2, 3, 20]
    assert geometry.kv_layer_of == {layer: layer for layer in range(78)}
    assert sum(map(geometry.owns_indexer, range(78))) == 21
