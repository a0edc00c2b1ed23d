"""Records of latents and index keys: from float elements to the bytes that kernels read, and back.

Every function takes and gives rows of tokens on any device. A record is a tuple of uint8 arrays
``[n, region_bytes]``, one per region of the dtype's `UnitLayout` (`DsaGeometry.unit_layout`,
`DsaGeometry.index_layout`). Arithmetic is float32; elements must be finite.

    latent   bf16          elements
             fp8           E4M3 of element / scale; the scale of the tensor is kept outside
             fp8_ds_mla    E4M3 of the compressed part, FP32 scale per 128 of it, BF16 rotary part
             nvfp4         E2M1 of all elements | E4M3 scale per 16 of them, in order
             nvfp4_ds_mla  E2M1 of the compressed part, E4M3 rotary part, E4M3 scale per 16 of the
                           former: scales are a matrix of 4 columns, stored column by column
    index    bf16          elements
             fp8           E4M3 | FP32 scale per 128
             mxfp4         E2M1 | E8M0 scale per 32

Sources: FlashMLA's V32_FP8Sparse records, TensorRT-LLM's roles, DeepGEMM's index keys, vLLM 0.33's
NVFP4 records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter import floats
from sparse_kvcm.adapter.scatter import Record
from sparse_kvcm.models import IndexDtype, KvDtype

if TYPE_CHECKING:
    import torch

IndexScale = Literal["fp32", "ue8m0"]

_TILE = 128  # elements of one FP32 scale
_LEAST_TILE_SCALE = (
    1.1754943508222875e-38  # the least normal float32: a tile of zeros divides by it
)
_LEAST_INDEX_AMAX = 1e-4  # of DeepGEMM: smaller keys keep this scale
_NVFP4_BLOCK = 16
_MXFP4_BLOCK = 32


def encode_latents(
    latents: torch.Tensor, kv_dtype: KvDtype, *, rank: int, scale: float = 1.0
) -> Record:
    """Quantise latents.

    Parameters
    ----------
    latents : torch.Tensor, float, shape (n, rank + rope)
        Compressed elements first.
    kv_dtype : str
        As in the module's description.
    rank : int
        Compressed elements.
    scale : float
        What one stored unit is worth, of the whole tensor: of ``fp8`` elements, and of scales of
        the NVFP4 formats. The rotary part of ``nvfp4_ds_mla`` is stored as it is.

    Returns
    -------
    tuple of torch.Tensor, uint8, shape (n, region_bytes)
        On the device of `latents`.

    Raises
    ------
    InvalidArgument
        If `latents` is not a matrix of more than `rank` columns, or the dtype is none of DSA's.
    """
    import torch

    if latents.ndim != 2 or latents.shape[1] <= rank:
        raise InvalidArgument(
            f"[encode_latents] latents must be (n, rank {rank} + rope), got {tuple(latents.shape)}"
        )
    if kv_dtype == "bf16":
        return (floats.to_bytes(latents.to(torch.bfloat16)),)
    values = latents.to(torch.float32)
    if kv_dtype == "fp8":
        return (floats.to_e4m3(floats.divide(values, scale)),)
    compressed, rope = values[:, :rank], values[:, rank:]
    if kv_dtype == "fp8_ds_mla":
        data, scales = _scaled_e4m3(compressed, _LEAST_TILE_SCALE * floats.E4M3_MAX)
        rest = floats.to_bytes(rope.to(torch.bfloat16))
        return (torch.cat([data, floats.to_bytes(scales), rest], 1),)
    if kv_dtype == "nvfp4":
        return _nvfp4(values, scale)
    if kv_dtype == "nvfp4_ds_mla":
        data, scales = _nvfp4(compressed, scale)
        columns = _blocks(scales, 4).transpose(1, 2).flatten(1)
        return (torch.cat([data, floats.to_e4m3(rope), columns], 1),)
    raise _unknown("encode_latents", "kv_dtype", kv_dtype)


def decode_latents(
    record: Record, kv_dtype: KvDtype, *, rank: int, rope: int, scale: float = 1.0
) -> torch.Tensor:
    """The elements of latents, float32 ``[n, rank + rope]``; parameters as `encode_latents`."""
    import torch

    data = record[0]
    if kv_dtype == "bf16":
        return data.contiguous().view(torch.bfloat16).to(torch.float32)
    if kv_dtype == "fp8":
        return floats.from_e4m3(data) * scale
    if kv_dtype == "fp8_ds_mla":
        tiles = rank // _TILE
        codes, scales, rest = torch.split(data, [rank, 4 * tiles, 2 * rope], 1)
        compressed = _unscaled_e4m3(codes, scales)
        rotary = rest.contiguous().view(torch.bfloat16).to(torch.float32)
        return torch.cat([compressed, rotary], 1)
    if kv_dtype == "nvfp4":
        return _from_nvfp4(data, record[1], scale)
    if kv_dtype == "nvfp4_ds_mla":
        codes, rest, columns = torch.split(data, [rank // 2, rope, rank // _NVFP4_BLOCK], 1)
        scales = _blocks(columns, columns.shape[1] // 4).transpose(1, 2).flatten(1)
        return torch.cat([_from_nvfp4(codes, scales, scale), floats.from_e4m3(rest)], 1)
    raise _unknown("decode_latents", "kv_dtype", kv_dtype)


def encode_index_keys(
    keys: torch.Tensor, index_dtype: IndexDtype, *, index_scale: IndexScale = "fp32"
) -> Record:
    """Quantise index keys.

    Parameters
    ----------
    keys : torch.Tensor, float, shape (n, index_head_dim)
    index_dtype : str
        As in the module's description.
    index_scale : {"fp32", "ue8m0"}
        Whether FP32 scales of ``fp8`` are rounded up to powers of two, which later GPUs want.

    Returns
    -------
    tuple of torch.Tensor, uint8, shape (n, region_bytes)
        Data and, if there are some, scales.
    """
    import torch

    if keys.ndim != 2:
        raise InvalidArgument(
            f"[encode_index_keys] keys must be (n, index_head_dim), got {tuple(keys.shape)}"
        )
    if index_dtype == "bf16":
        return (floats.to_bytes(keys.to(torch.bfloat16)),)
    values = keys.to(torch.float32)
    if index_dtype == "fp8":
        data, scales = _scaled_e4m3(values, _LEAST_INDEX_AMAX, index_scale)
        return data, floats.to_bytes(scales)
    if index_dtype == "mxfp4":
        blocks = _blocks(values, _MXFP4_BLOCK)
        amax = blocks.abs().amax(-1).clamp(min=_LEAST_TILE_SCALE)
        exponent = floats.exponent_at_least(floats.divide(amax, floats.E2M1_MAX))
        data = floats.to_e2m1((blocks / floats.power_of_two(exponent)[..., None]).flatten(1))
        return data, floats.to_e8m0(exponent)
    raise _unknown("encode_index_keys", "index_dtype", index_dtype)


def decode_index_keys(record: Record, index_dtype: IndexDtype) -> torch.Tensor:
    """The elements of index keys, float32 ``[n, index_head_dim]``."""
    import torch

    data = record[0]
    if index_dtype == "bf16":
        return data.contiguous().view(torch.bfloat16).to(torch.float32)
    if index_dtype == "fp8":
        return _unscaled_e4m3(data, record[1])
    if index_dtype == "mxfp4":
        blocks = _blocks(floats.from_e2m1(data), _MXFP4_BLOCK)
        return (blocks * floats.from_e8m0(record[1])[..., None]).flatten(1)
    raise _unknown("decode_index_keys", "index_dtype", index_dtype)


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Cut rows in pieces: ``[n, d / size, size]``."""
    return values.reshape(values.shape[0], values.shape[1] // size, size)


def _scaled_e4m3(
    values: torch.Tensor, least_amax: float, index_scale: IndexScale = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and one float32 scale per 128 elements, the largest of which becomes 448."""
    tiles = _blocks(values, _TILE)
    scales = floats.divide(tiles.abs().amax(-1).clamp(min=least_amax), floats.E4M3_MAX)
    if index_scale == "ue8m0":
        scales = floats.power_of_two(floats.exponent_at_least(scales))
    return floats.to_e4m3((tiles / scales[..., None]).flatten(1)), scales


def _unscaled_e4m3(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    import torch

    tiles = _blocks(floats.from_e4m3(codes), _TILE)
    return (tiles * scales.contiguous().view(torch.float32)[..., None]).flatten(1)


def _nvfp4(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes and one E4M3 scale per 16 elements, in units of `scale`."""
    blocks = _blocks(values, _NVFP4_BLOCK)
    scales = floats.to_e4m3(floats.divide(blocks.abs().amax(-1), floats.E2M1_MAX * scale))
    unit = floats.from_e4m3(scales) * scale
    # Where the scale has become 0 so do all codes.
    quotients = (blocks / unit[..., None]).masked_fill(unit[..., None] == 0, 0)
    return floats.to_e2m1(quotients.flatten(1)), scales


def _from_nvfp4(codes: torch.Tensor, scales: torch.Tensor, scale: float) -> torch.Tensor:
    blocks = _blocks(floats.from_e2m1(codes), _NVFP4_BLOCK)
    return (blocks * (floats.from_e4m3(scales) * scale)[..., None]).flatten(1)


def _unknown(function: str, name: str, value: str) -> InvalidArgument:
    return InvalidArgument(f"[{function}] {name} must be one of DSA's, got {value!r}")
