"""Geometry of models against published counts and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sparse_kvcm as kvcm
from sizing_cases import tiny_dsa, tiny_v4
from sparse_kvcm.models import DeepSeekV4Geometry, DsaGeometry, geometry_of, load_geometry, presets

GIB = 1 << 30
K = 1 << 10
# Roles and, where there are several, the kind of storage layer.
C4, INDEX = "deepseek_v4_compress", "deepseek_v4_indexer_compress1"


def bytes_at(model: str, kv_dtype: Any, tokens: int) -> dict[str, float]:
    """GiB by role of a request of `tokens`, whole pages."""
    geometry = load_geometry(model)
    page = 256 if isinstance(geometry, DeepSeekV4Geometry) else 64
    sums: dict[str, float] = {}
    for layer in geometry.layers(page, kv_dtype, "fp8"):
        if layer.sliding_window_size is not None:
            continue
        ratio = (
            "" if layer.layer_id < geometry.num_layers else layer.layer_id // geometry.num_layers
        )
        for buffer in layer.buffers:
            role = f"{buffer.role}{ratio}"
            sums[role] = sums.get(role, 0) + buffer.page_bytes * tokens / page / GIB
    return sums


def test_every_preset_names_its_sources_and_loads() -> None:
    assert len(presets()) == 6
    for name, sources in presets().items():
        assert sources
        geometry = load_geometry(name)
        assert geometry.name == name
        assert geometry.compute is not None


# Layers, selection groups and largest group: the census of the public configurations.
@pytest.mark.parametrize(
    ("model", "layers", "groups", "largest", "top_k"),
    [
        ("deepseek-v3.2", 61, 61, 1, 2048),
        ("glm-5", 78, 78, 1, 2048),
        ("glm-5.1", 78, 78, 1, 2048),
        ("glm-5.2", 78, 21, 4, 2048),
        ("deepseek-v4-flash", 43, 21, 1, 512),
        ("deepseek-v4-pro", 61, 30, 1, 1024),
    ],
)
def test_a_preset_has_the_published_groups(
    model: str, layers: int, groups: int, largest: int, top_k: int
) -> None:
    geometry = load_geometry(model)
    assert geometry.num_layers == layers
    assert len(geometry.groups) == groups
    assert max(map(len, geometry.groups)) == largest
    assert geometry.top_k == top_k


def test_glm_5_2_leads_groups_at_the_published_layers() -> None:
    leaders = [group[0] for group in load_geometry("glm-5.2").groups]
    assert leaders == [0, 1, *range(2, 75, 4)]


@pytest.mark.parametrize(
    ("model", "ratio_128"), [("deepseek-v4-flash", 20), ("deepseek-v4-pro", 31)]
)
def test_v4_has_the_published_number_of_dense_compressed_layers(model: str, ratio_128: int) -> None:
    geometry = load_geometry(model)
    assert isinstance(geometry, DeepSeekV4Geometry)
    assert geometry.compress_ratios.count(128) == ratio_128


# GiB per request with FP8 records and index keys, as published for 128K and 1M tokens.
@pytest.mark.parametrize(
    ("model", "tokens", "published"),
    [
        ("deepseek-v3.2", 128 * K, {"KEY": 4.88, "INDEX_KEY1": 0.98}),
        ("glm-5.1", 128 * K, {"KEY": 6.25, "INDEX_KEY1": 1.26}),
        ("glm-5.2", 128 * K, {"KEY": 6.25, "INDEX_KEY1": 0.34}),
        ("glm-5.2", K * K, {"KEY": 50.0, "INDEX_KEY1": 2.7}),
        ("deepseek-v4-flash", 128 * K, {C4: 0.37, INDEX: 0.08}),
        ("deepseek-v4-pro", 128 * K, {C4: 0.53, INDEX: 0.12}),
        ("deepseek-v4-flash", K * K, {C4: 2.99}),
        ("deepseek-v4-pro", K * K, {C4: 4.28}),
    ],
)
def test_bytes_per_request_are_the_published_ones(
    model: str, tokens: int, published: dict[str, float]
) -> None:
    computed = bytes_at(model, "fp8_ds_mla", tokens)
    for role, gib in published.items():
        # To the last digit printed; V4's pages are rounded up to 576 B.
        assert computed[role] == pytest.approx(gib, abs=0.0056, rel=0.005), role


@pytest.mark.parametrize(("kv_dtype", "gigabytes"), [("fp8_ds_mla", 0.21), ("bf16", 0.37)])
def test_a_cache_of_two_selections_has_the_published_bytes(kv_dtype: Any, gigabytes: float) -> None:
    geometry = load_geometry("glm-5.2")
    row = geometry.num_layers * geometry.unit_layout(kv_dtype).unit_bytes
    assert 2 * geometry.top_k * row / 1e9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize(
    ("model", "heads"), [("deepseek-v3.2", 64), ("glm-5", 32), ("glm-5.1", 32), ("glm-5.2", 32)]
)
def test_indexers_have_the_published_heads(model: str, heads: int) -> None:
    geometry = load_geometry(model)
    assert isinstance(geometry, DsaGeometry)
    assert geometry.index_n_heads == heads
    assert geometry.index_head_dim == 128


def test_heads_that_a_config_json_leaves_out_are_those_of_its_type() -> None:
    for kind, heads in (("glm_moe_dsa", 32), ("deepseek_v32", 64)):
        geometry = geometry_of(glm(model_type=kind))
        assert isinstance(geometry, DsaGeometry)
        assert geometry.index_n_heads == heads


@pytest.mark.parametrize(
    ("index_dtype", "regions"), [("bf16", [256]), ("fp8", [128, 4]), ("mxfp4", [64, 4])]
)
def test_index_keys_have_the_regions_of_their_kernels(index_dtype: Any, regions: list[int]) -> None:
    assert load_geometry("glm-5.2").index_layout(index_dtype).region_bytes == regions


def test_nvfp4_scales_are_a_buffer_of_their_own() -> None:
    layer = load_geometry("glm-5.2").sparse_layers(64, "nvfp4")[0]
    sizes = [(buffer.role, buffer.page_bytes) for buffer in layer.buffers]
    assert sizes == [("KEY", 64 * 288), ("KEY_BLOCK_SCALE", 64 * 36)]


def test_glm_5_2_keeps_47_700_bytes_per_token() -> None:
    layers = load_geometry("glm-5.2").layers(64, "fp8", "fp8")
    assert sum(b.page_bytes for layer in layers for b in layer.buffers) == 64 * 47_700


@pytest.mark.parametrize(
    ("model", "kv_dtype", "regions"),
    [
        ("glm-5.2", "bf16", [1152]),
        ("glm-5.2", "fp8", [576]),
        ("glm-5.2", "fp8_ds_mla", [656]),
        ("glm-5.2", "nvfp4", [288, 36]),
        ("glm-5.2", "nvfp4_ds_mla", [352]),
        ("deepseek-v4-flash", "bf16", [1024]),
        ("deepseek-v4-flash", "fp8", [512]),
        ("deepseek-v4-flash", "fp8_ds_mla", [576, 8]),
        ("deepseek-v4-flash", "nvfp4", [256, 32]),
    ],
)
def test_a_unit_has_the_regions_of_its_kernels(
    model: str, kv_dtype: Any, regions: list[int]
) -> None:
    assert load_geometry(model).unit_layout(kv_dtype).region_bytes == regions


def glm(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 64,
        "max_position_embeddings": 4096,
    }
    return config | changes


def test_a_list_comes_before_a_pattern_and_a_pattern_before_a_frequency() -> None:
    both = {"index_topk_pattern": "FSFSFS", "index_topk_freq": 3}
    kinds = ["full", "shared", "shared", "full", "shared", "shared"]
    assert geometry_of(glm(**both)).groups == ((0, 1), (2, 3), (4, 5))
    assert geometry_of(glm(indexer_types=kinds, **both)).groups == ((0, 1, 2), (3, 4, 5))


def test_a_config_json_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(glm()))
    assert load_geometry(path) == load_geometry(tmp_path)


def test_a_data_type_that_the_width_cannot_have_is_named() -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"kv_dtype must be one .*, got 'nvfp4', which"):
        geometry_of(glm(kv_lora_rank=32, qk_rope_head_dim=4)).unit_layout("nvfp4")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "llama"}, "model_type must be one of deepseek_v32, .*, got 'llama'"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be an integer in \[1, 4096\], got 0"),
        ({"kv_lora_rank": None}, r"kv_lora_rank must be an integer in \[1, 2147483647\], got None"),
        ({"index_topk": True}, r"index_topk must be an integer in \[1, 65535\], got True"),
        ({"indexer_types": ["full"]}, "must name 6 layers, got 1"),
        ({"indexer_types": ["shared"] * 6}, "layer 0 must own an indexer"),
        ({"indexer_types": 5}, "indexer_types must be made of full and shared, got 5"),
        ({"indexer_types": ["full"] * 5 + ["Full"]}, "made of full and shared, got .*'Full'"),
        ({"index_topk_pattern": "FSSFXS"}, "index_topk_pattern must be made of F and S, got"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be .* 4096\], got 1000000000"),
        ({"index_topk": 65_536}, r"index_topk must be .* 65535\], got 65536"),
        ({"index_skip_topk_offset": -1}, r"index_skip_topk_offset must be .*\[0, .*, got -1"),
        (
            {"model_type": "deepseek_v4"},
            "compress_ratios must be a list of integers >= 0, got None",
        ),
    ],
)
def test_a_bad_configuration_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=field):
        geometry_of(glm(**changes))


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "message"),
    [
        ({"kv_lora_rank": 100}, "fp8_ds_mla", "multiples of 128: kv_lora_rank is 100"),
        ({"kv_lora_rank": 64}, "fp8_ds_mla", "multiples of 128: kv_lora_rank is 64"),
        ({"kv_lora_rank": 500}, "nvfp4", r"of 64: kv_lora_rank \+ qk_rope_head_dim is 504"),
        ({"kv_lora_rank": 500}, "nvfp4_ds_mla", "multiples of 64: kv_lora_rank is 500"),
    ],
)
def test_a_latent_whose_scales_are_not_whole_is_refused_by_field(
    changes: dict[str, Any], kv_dtype: Any, message: str
) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"kv_dtype must be .*{message}"):
        tiny_dsa(**changes).unit_layout(kv_dtype)


@pytest.mark.parametrize(
    ("head_dim", "rope", "kv_dtype", "message"),
    [
        (512, 60, "fp8_ds_mla", "multiples of 64: head_dim - qk_rope_head_dim is 452"),
        (64, 64, "fp8_ds_mla", "multiples of 64: head_dim - qk_rope_head_dim is 0"),
        (520, 64, "nvfp4", "multiples of 64: head_dim is 520"),
    ],
)
def test_an_entry_whose_scales_are_not_whole_is_refused_by_field(
    head_dim: int, rope: int, kv_dtype: Any, message: str
) -> None:
    geometry = tiny_v4(head_dim=head_dim, qk_rope_head_dim=rope)
    with pytest.raises(kvcm.InvalidArgument, match=rf"kv_dtype must be .*{message}"):
        geometry.unit_layout(kv_dtype)


@pytest.mark.parametrize(("index_dtype", "width"), [("fp8", 64), ("fp8", 192), ("mxfp4", 33)])
def test_an_index_key_whose_scales_are_not_whole_is_refused(index_dtype: Any, width: int) -> None:
    message = f"index_dtype must be .* multiples of 128: index_head_dim is {width}"
    with pytest.raises(kvcm.InvalidArgument, match=message):
        tiny_dsa(index_head_dim=width).index_layout(index_dtype)


@pytest.mark.parametrize("model", ["x" * 5000, "no\0path", "/", None, 7])
def test_what_cannot_be_a_path_is_refused_in_a_short_line(model: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"\[load_geometry\] model must be") as error:
        load_geometry(model)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe{}", b"[1, 2]", b"9" * 5000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(kvcm.InvalidArgument, match=r"config.json must be"):
        load_geometry(path)


@pytest.mark.parametrize("config", [None, [], "deepseek_v4"])
def test_a_configuration_is_a_mapping(config: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"\[ModelGeometry\] config must be a mapping"):
        geometry_of(config)


def test_an_entry_has_at_least_its_rotary_elements() -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"qk_rope_head_dim .* in \[1, 64\], got 65"):
        tiny_v4(head_dim=64, qk_rope_head_dim=65)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="glm-5.2.*got 'glm-9'"):
        load_geometry("glm-9")


@pytest.mark.parametrize(
    ("model", "kv_dtype", "page"),
    [("glm-5.2", "fp8_ds_mla", 32), ("deepseek-v4-flash", "fp8", 64)],
)
def test_a_page_that_kernels_cannot_have_is_refused(model: str, kv_dtype: Any, page: int) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=f"tokens_per_block must be .*, got {page}"):
        load_geometry(model).layers(page, kv_dtype, "fp8")
