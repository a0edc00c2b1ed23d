"""What a DeepSeek-V4 keeps: layers, types, windows and bytes, against published facts."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.models import AttentionType, DeepSeekV4Geometry, geometry_of, load_geometry
from sparse_kvcm.models.attention_types import types_of_ratio, virtual_layer_id

K = 1 << 10
FLASH, PRO = "deepseek-v4-flash", "deepseek-v4-pro"
SHARED, PER_LAYER = kvcm.PageIndexMode.SHARED, kvcm.PageIndexMode.PER_LAYER


def preset(name: str) -> DeepSeekV4Geometry:
    geometry = load_geometry(name)
    assert isinstance(geometry, DeepSeekV4Geometry)
    return geometry


def buffers(geometry: Any, page: int = 256, **dtypes: str) -> dict[tuple[int, str], Any]:
    """Window and bytes of a page by (model layer, role), of a resident worker."""
    found = {}
    for layer in geometry.layers(page, dtypes.get("kv", "bf16"), dtypes.get("index", "fp8")):
        for buffer in layer.buffers:
            key = layer.layer_id % geometry.num_layers, buffer.role
            assert key not in found
            found[key] = layer.sliding_window_size, buffer.page_bytes
    return found


@pytest.mark.parametrize(
    ("model", "windows", "ratio_4", "ratio_128"),
    [
        (FLASH, [0, 1], range(2, 43, 2), range(3, 42, 2)),
        (PRO, [], range(2, 61, 2), [0, 1, *range(3, 60, 2)]),
    ],
)
def test_layers_have_the_published_ratios(
    model: str, windows: Any, ratio_4: Any, ratio_128: Any
) -> None:
    geometry = preset(model)
    assert geometry.layers_of(0) == list(windows)
    assert geometry.layers_of(4) == list(ratio_4) == geometry.history_layers
    assert geometry.layers_of(128) == list(ratio_128)


def test_seven_types_are_numbered_named_and_indexed_as_published() -> None:
    table = [
        ("swa", PER_LAYER),
        ("compressor_kv", PER_LAYER),
        ("compressor_score", PER_LAYER),
        ("indexer_compressor_kv", PER_LAYER),
        ("indexer_compressor_score", PER_LAYER),
        ("compress", SHARED),
        ("indexer_compress", SHARED),
    ]
    for number, (name, mode) in enumerate(table):
        kind = AttentionType(number)
        assert (kind.role, kind.index_mode) == (f"deepseek_v4_{name}", mode)
    assert [len(types_of_ratio(ratio)) for ratio in (0, 1, 4, 128)] == [1, 1, 7, 4]
    assert virtual_layer_id(3, AttentionType.COMPRESS) == 26


def test_every_layer_has_the_buffers_of_its_ratio_and_no_other() -> None:
    geometry = preset(FLASH)
    found = buffers(geometry)
    for layer, ratio in enumerate(geometry.compress_ratios):
        roles = {role for one, role in found if one == layer}
        assert roles == {kind.role for kind in types_of_ratio(ratio)}


# Windows and bytes of a page of 256 tokens: 64 entries of ratio 4, 2 of ratio 128.
@pytest.mark.parametrize(
    ("kv", "window", "ratio_4", "ratio_128"),
    [
        ("bf16", 256 * 1024, 64 * 1024, 2 * 1024),
        ("fp8", 256 * 512, 64 * 512, 2 * 512),
        ("fp8_ds_mla", 149_760, 37_440, 1_728),  # rounded up to 576
        ("nvfp4", 256 * 512, 64 * 256, 2 * 512),
    ],
)
def test_pages_have_the_published_bytes(kv: str, window: int, ratio_4: int, ratio_128: int) -> None:
    found = buffers(preset(FLASH), kv=kv)
    assert found[2, "deepseek_v4_swa"] == (128, window)
    assert found[2, "deepseek_v4_compress"] == (None, ratio_4)
    assert found[3, "deepseek_v4_compress"] == (None, ratio_128)
    scales = found.get((2, "deepseek_v4_compress_block_scale"))
    assert scales == ((None, 64 * 32) if kv == "nvfp4" else None)


@pytest.mark.parametrize(("index", "entry"), [("fp8", 132), ("mxfp4", 68), ("bf16", 256)])
def test_index_keys_have_the_published_bytes(index: str, entry: int) -> None:
    assert buffers(preset(PRO), index=index)[2, "deepseek_v4_indexer_compress"] == (
        None,
        64 * entry,
    )


def test_states_keep_fp32_inputs_of_both_series_where_entries_overlap() -> None:
    found = buffers(preset(FLASH))
    for half in ("kv", "score"):
        assert found[2, f"deepseek_v4_compressor_{half}"] == (8, 8 * 2 * 512 * 4)
        assert found[2, f"deepseek_v4_indexer_compressor_{half}"] == (8, 8 * 2 * 128 * 4)
        # A group of 128 begins with a page, so the page of the token at hand has all of it.
        assert found[3, f"deepseek_v4_compressor_{half}"] == (1, 128 * 512 * 4)


# GiB of a request with records of 584 B and FP8 index keys: the published table, which has no
# rounding of pages. (tokens, ratio-4 entries, ratio-128 entries, total with index keys, windows)
@pytest.mark.parametrize(
    ("model", "tokens", "ratio_4", "ratio_128", "total"),
    [
        (FLASH, 128 * K, 0.37, 0.01, None),
        (FLASH, K * K, 2.99, 0.09, 3.76),
        (PRO, 128 * K, 0.53, 0.02, None),
        (PRO, K * K, 4.28, 0.14, 5.39),
    ],
)
def test_bytes_per_request_are_the_published_ones(
    model: str, tokens: int, ratio_4: float, ratio_128: float, total: float | None
) -> None:
    geometry = preset(model)
    unit = geometry.unit_layout("fp8_ds_mla").unit_bytes
    index = geometry.index_layout("fp8").unit_bytes
    at_4 = len(geometry.layers_of(4)) * tokens // 4
    at_128 = len(geometry.layers_of(128)) * tokens // 128
    gib = 1 << 30
    assert at_4 * unit / gib == pytest.approx(ratio_4, abs=0.0051)
    assert at_128 * unit / gib == pytest.approx(ratio_128, abs=0.0051)
    if total is not None:
        windows = geometry.num_layers * geometry.sliding_window
        everything = at_4 * (unit + index) + (at_128 + windows) * unit
        assert everything / gib == pytest.approx(total, abs=0.0051)


def test_offload_splits_entries_of_ratio_4_from_their_index_keys() -> None:
    geometry = preset(FLASH)
    sparse = geometry.sparse_layers(128, "fp8_ds_mla")
    dense = geometry.dense_layers(128, "fp8_ds_mla", "fp8")
    assert [layer.layer_id for layer in sparse] == geometry.layers_of(4)
    assert all(buffer.is_sparse for layer in sparse for buffer in layer.buffers)
    roles = {
        (layer.layer_id % 43, b.role) for layer in dense for b in layer.buffers if not b.is_sparse
    }
    assert (2, "deepseek_v4_indexer_compress") in roles
    assert (2, "deepseek_v4_compress") not in roles
    assert (3, "deepseek_v4_compress") in roles


def test_a_config_of_transformers_reads_as_the_checkpoint_it_came_from() -> None:
    transformers = pytest.importorskip("transformers")
    config = {
        "num_hidden_layers": 4,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_topk": 512,
        "index_head_dim": 128,
        "max_position_embeddings": 4096,
    }
    ratios = [0, 4, 128, 4]
    theirs = transformers.DeepseekV4Config(compress_ratios=ratios, **config).to_dict()
    assert "compress_ratios" not in theirs
    checkpoint = {"model_type": "deepseek_v4", "compress_ratios": [*ratios, 0], **config}
    assert geometry_of(theirs, "one") == geometry_of(checkpoint, "one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types must have 2"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must have 2"),
        (
            {"compress_rates": {"heavily_compressed_attention": 32}},
            "must be 128 for heavily_compressed_attention, got 32",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "must have a 4"),
    ],
)
def test_layers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 2,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "index_topk": 8,
        "max_position_embeddings": 64,
    }
    with pytest.raises(kvcm.InvalidArgument, match=message):
        geometry_of(config | changes)
