"""Buffers and page tables that a DeepSeek-V4 manager cannot read are refused when it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from sparse_kvcm.adapter.slot_mapping import PageGeometry  # noqa: E402
from sparse_kvcm.deepseek_v4 import indices  # noqa: E402
from sparse_kvcm.deepseek_v4.pools import TypePool, same_pages  # noqa: E402
from sparse_kvcm.models import load_geometry  # noqa: E402
from v4_cases import INDEX, SWA, C, Run  # noqa: E402

UNIT = kvcm.UnitLayout([64])
PAGE = PageGeometry(UNIT, 128)


def storage(*layers: Any) -> kvcm.Storage:
    """Layers as (window, {role: page bytes, or (page bytes, tokens per block)})."""
    made = []
    for layer_id, (window, buffers) in enumerate(layers):
        sizes = {
            role: size if isinstance(size, tuple) else (size,) for role, size in buffers.items()
        }
        made.append(
            kvcm.LayerConfig(
                layer_id,
                [kvcm.BufferConfig(role, *size) for role, size in sizes.items()],
                sliding_window_size=window,
            )
        )
    tiers = [kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, 1 << 22)]
    return kvcm.Storage(kvcm.StorageConfig(cache_tiers=tiers, layers=made, tokens_per_block=128))


def pool(made: kvcm.Storage, kind: Any = SWA, page: PageGeometry = PAGE, **layers: int) -> TypePool:
    found = layers or {str(i): i for i in range(2)}
    return TypePool(made, kind, kind.role, {int(k.strip("l")): v for k, v in found.items()}, page)


ROLE = SWA.role
SIZE = PAGE.page_bytes


def test_layers_of_one_pool_are_taken() -> None:
    made = pool(storage((40, {ROLE: SIZE}), (40, {ROLE: SIZE})))
    assert (made.scale, sorted(made.positions)) == (2, [0, 1])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(40, {ROLE: SIZE}), (41, {ROLE: SIZE})], "layer group of storage layer 1 must be"),
        ([(40, {ROLE: SIZE}), (None, {ROLE: SIZE})], "layer group of storage layer 1 must be"),
        ([(40, {ROLE: SIZE}), (40, {ROLE: 2 * SIZE})], "pool of storage layer 1 must be"),
        ([(40, {ROLE: 2 * SIZE})] * 2, "page_bytes of storage layer 0 must be 8192, got 16384"),
        (
            [(40, {ROLE: (SIZE, 64)})] * 2,
            "expansion of storage layer 0 must be 1, got 2",
        ),
    ],
)
def test_layers_that_do_not_share_a_pool_are_refused(layers: Any, message: str) -> None:
    made = storage(*layers)
    with pytest.raises(kvcm.InvalidArgument, match=rf"\[TypePool\] {ROLE}: {message}"):
        pool(made)


def test_a_role_or_layer_that_the_storage_does_not_have_is_refused() -> None:
    made = storage((40, {ROLE: SIZE}), (40, {ROLE: SIZE}))
    with pytest.raises((kvcm.InvalidArgument, IndexError), match="deepseek_v4_compress"):
        pool(made, C)
    with pytest.raises((kvcm.InvalidArgument, IndexError), match="7"):
        pool(made, l0=0, l1=7)


def test_offloaded_entries_are_no_pool() -> None:
    made = cases.manager(True)
    layout, page = made.store.storage.layout, made.access.layout(1, C).page
    sparse = [
        one for one in layout.all_buffer_ids() if layout.place(one.layer_id, one.role).is_sparse
    ]
    layers, (role, *_) = {one.layer_id: one.layer_id for one in sparse}, [b.role for b in sparse]
    assert sorted(layers) == [1, 3]
    with pytest.raises(kvcm.InvalidArgument, match="is sparse: .* resolve and fetch"):
        TypePool(made.store.storage, C, role, layers, page)


def test_entries_of_two_ratios_are_no_pool() -> None:
    made = cases.manager(False)
    model, layout = made.config.geometry, made.access.layout(1, C)
    layers = {layer: model.storage_layer_of(C, layer) for layer in (1, 2)}
    with pytest.raises(kvcm.InvalidArgument, match=f"{C.role}: .* of storage layer .* must be"):
        TypePool(made.store.storage, C, C.role, layers, layout.page)


def test_rows_of_another_format_are_refused() -> None:
    """A manager that was sized for other records than it reads."""
    made = cases.manager(False)
    for kind in (SWA, C, INDEX):
        (right, *_) = made.access.pools[4, kind]
        page = PageGeometry(kvcm.UnitLayout([12]), right.page.tokens_per_block)
        with pytest.raises(kvcm.InvalidArgument, match=f"{kind.role}: page_bytes"):
            TypePool(right.storage, kind, kind.role, right.layers, page)


def test_scales_with_other_page_indices_than_their_data_are_refused() -> None:
    data, scale = "deepseek_v4_compress", "deepseek_v4_compress_block_scale"
    made = storage((None, {data: SIZE, "other": SIZE, scale: SIZE // 8}))
    pools = [
        TypePool(made, C, role, {0: 0}, PageGeometry(kvcm.UnitLayout([size]), 128))
        for role, size in ((data, 64), (scale, 8))
    ]
    with pytest.raises(kvcm.InvalidArgument, match=rf"{data} and {scale} must be .* \[2, 1\]"):
        same_pages(pools)


def test_a_page_table_of_other_rows_is_refused() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    for wrong, local in (
        (table, torch.zeros(3, 1)),
        (table[0], torch.zeros(2, 1)),
        (table, table[0]),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=r"\[global_indices\] page_table and local"):
            indices.global_indices(wrong, local, 128)
    one = torch.zeros(1, dtype=torch.int64)
    for wrong, rows, items in (
        (table[0], one, one),
        (table, one, one[None]),
        (table, one[:0], one),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=r"\[map_items\] page_table, rows and items"):
            indices.map_items(wrong, rows, items, PAGE, 128)
    for items_per_page in (0, 64, 200):
        with pytest.raises(kvcm.InvalidArgument, match="multiple of the page's 128 rows"):
            indices.map_items(table, one, one, PAGE, items_per_page)


# --- MTP layers: the trailing ratios ---

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


@pytest.mark.parametrize("tail", [[], [0], [0, 0, 0], [4], [128, 0]])
def test_ratios_past_the_layers_are_mtp_s_and_keep_nothing(tail: list[int]) -> None:
    ratios = [0, 4, 128, 4, 128]
    found = cases.geometry(compress_ratios=ratios + tail)
    assert found == cases.geometry(compress_ratios=ratios)
    stored = {layer.layer_id % 5 for layer in found.layers(128, "bf16", "bf16")}
    assert stored == set(range(5))


def test_published_models_have_one_ratio_past_their_layers() -> None:
    for name, layers in (("deepseek-v4-flash", 43), ("deepseek-v4-pro", 61)):
        geometry = load_geometry(name)
        assert geometry.num_layers == len(geometry.compress_ratios) == layers  # type: ignore[attr-defined]


@MODES
@pytest.mark.parametrize("ratios", [[0, 4, 128, 0], [128, 4, 0], [4, 0, 0, 0]])
def test_an_mtp_layer_that_is_counted_keeps_a_window_alone(offload: bool, ratios: Any) -> None:
    """An engine that runs it counts it in num_hidden_layers; Pro has no other such layer."""
    model = cases.geometry(num_hidden_layers=len(ratios), compress_ratios=ratios)
    last = len(ratios) - 1
    stored = [
        one for one in model.layers(128, "bf16", "bf16") if one.layer_id % len(ratios) == last
    ]
    assert [[buffer.role for buffer in one.buffers] for one in stored] == [[SWA.role]]
    assert stored[0].sliding_window_size == cases.WINDOW
    run = Run(offload, geometry=model)
    run.add(1, 126)
    run.add(2, 3)
    run.step(8, padded=3)
    run.open()
    found = run.manager.attention_indices(last)
    assert found.compressed.shape == (2, 0)
    for kind in (C, INDEX, *cases.STATES):
        with pytest.raises(kvcm.InvalidArgument, match=rf"must be one with .* got {last}"):
            run.manager.get_buffers(last, kind)
    with pytest.raises(kvcm.InvalidArgument, match=f"INDEXER_COMPRESS, of .* got {last}"):
        run.manager.select(last, torch.from_numpy(np.zeros((2, 1), np.int32)))
    run.manager.abort_step()
