"""Bytes of a unit and of an index key in each data type.

Sources: FlashMLA (V32_FP8Sparse and MODEL1_FP8Sparse records), DeepGEMM (index keys), vLLM 0.33
(NVFP4 and MXFP4 records).
"""

from __future__ import annotations

from typing import Literal, get_args

from sparse_kvcm._core import InvalidArgument, UnitLayout

KvDtype = Literal["bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"]
IndexDtype = Literal["bf16", "fp8", "mxfp4"]


def latent_layout(kv_dtype: KvDtype, rank: int, rope: int) -> UnitLayout:
    """The record of a DSA latent: `rank` compressed elements and `rope` rotary ones."""
    width = rank + rope
    regions = {
        "bf16": [2 * width],
        "fp8": [width],  # one scale per tensor, outside
        "fp8_ds_mla": [rank + 4 * (rank // 128) + 2 * rope],
        "nvfp4": [width // 2, width // 16],
        "nvfp4_ds_mla": [rank // 2 + rope + rank // 16],
    }
    known = _known(regions, kv_dtype, "DSA")
    if kv_dtype == "fp8_ds_mla":
        _check_multiple("kv_lora_rank", rank, 128, kv_dtype)
    elif kv_dtype == "nvfp4":
        _check_multiple("kv_lora_rank + qk_rope_head_dim", width, 64, kv_dtype)
    elif kv_dtype == "nvfp4_ds_mla":
        _check_multiple("kv_lora_rank", rank, 64, kv_dtype)  # four scales to a row of their matrix
    return _layout(known, kv_dtype)


def compressed_layout(kv_dtype: KvDtype, head_dim: int, rope: int) -> UnitLayout:
    """The record of a DeepSeek-V4 entry, key and value in one."""
    if kv_dtype == "nvfp4":
        _check_multiple("head_dim", head_dim, 64, kv_dtype)
    if kv_dtype == "fp8_ds_mla":
        _check_multiple("head_dim - qk_rope_head_dim", head_dim - rope, 64, kv_dtype)
        data = head_dim - rope + 2 * rope
        return _layout([data, (head_dim - rope) // 64 + 1], kv_dtype, page_alignment=data)
    regions = {
        "bf16": [2 * head_dim],
        "fp8": [head_dim],
        "nvfp4": [head_dim // 2, head_dim // 16],
    }
    return _layout(_known(regions, kv_dtype, "DeepSeek-V4"), kv_dtype)


def window_dtype(kv_dtype: KvDtype) -> KvDtype:
    """The data type of DeepSeek-V4's windows and ratio-128 entries: FP8 where others are NVFP4."""
    return "fp8" if kv_dtype == "nvfp4" else kv_dtype


def index_layout(index_dtype: IndexDtype, index_head_dim: int) -> UnitLayout:
    """The record of one index key: its data and, if it is quantised, its scales.

    As regions of a page: all tokens' data come first, then all tokens' scales.
    """
    regions = {
        "bf16": [2 * index_head_dim],
        "fp8": [index_head_dim, 4 * (index_head_dim // 128)],
        "mxfp4": [index_head_dim // 2, index_head_dim // 32],
    }
    if index_dtype not in regions:
        raise InvalidArgument(
            f"[ModelGeometry] index_dtype must be one of {', '.join(get_args(IndexDtype))}, "
            f"got {index_dtype!r}"
        )
    if index_dtype != "bf16":
        _check_multiple("index_head_dim", index_head_dim, 128, index_dtype)
    return UnitLayout(regions[index_dtype])


def _layout(regions: list[int], kv_dtype: KvDtype, **options: int) -> UnitLayout:
    try:
        return UnitLayout(regions, **options)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"[ModelGeometry] kv_dtype must be one that the model's width can have, got "
            f"{kv_dtype!r}, a unit of {' + '.join(map(str, regions))} B: {error}"
        ) from error


def _known(regions: dict[str, list[int]], kv_dtype: KvDtype, kind: str) -> list[int]:
    if kv_dtype not in regions:
        raise InvalidArgument(
            f"[ModelGeometry] kv_dtype of a {kind} model must be one of {', '.join(regions)}, "
            f"got {kv_dtype!r}"
        )
    return regions[kv_dtype]


def _check_multiple(field: str, value: int, of: int, dtype: str) -> None:
    if value < of or value % of:
        kind = "index_dtype" if field.startswith("index") else "kv_dtype"
        raise InvalidArgument(
            f"[ModelGeometry] {kind} must be one that the model's width can have, got {dtype!r}, "
            f"which takes multiples of {of}: {field} is {value}; bf16 takes any"
        )
