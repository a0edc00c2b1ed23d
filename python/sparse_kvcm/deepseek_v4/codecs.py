"""Records of window tokens and compressed entries: from elements to the bytes that kernels read.

A record is a tuple of uint8 arrays ``[n, region_bytes]``, one per region of
`DeepSeekV4Geometry.unit_layout`. Elements are finite, the rotary ones last.

    bf16          elements
    fp8           E4M3 of element / scale; the scale of the tensor is kept outside
    fp8_ds_mla    E4M3 of the non-rotary elements, BF16 rotary ones | E8M0 scale per 64 of the
                  former, one byte of padding
    nvfp4         E2M1 of all elements | E4M3 scale per 16 of them, in order

Sources: FlashMLA's MODEL1_FP8Sparse records, TensorRT-LLM's roles. Index keys are those of
`sparse_kvcm.dsa.codecs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter import floats
from sparse_kvcm.adapter.scatter import Record
from sparse_kvcm.dsa.codecs import decode_latents, encode_latents
from sparse_kvcm.models import KvDtype

if TYPE_CHECKING:
    import torch

_TILE = 64  # elements of one E8M0 scale
_LEAST_AMAX = 1e-4  # of DeepSeek's own quantisation: smaller tiles keep this scale


def encode_entries(
    entries: torch.Tensor, kv_dtype: KvDtype, *, rope: int, scale: float = 1.0
) -> Record:
    """Quantise entries.

    Parameters
    ----------
    entries : torch.Tensor, float, shape (n, head_dim)
    kv_dtype : str
        As in the module's description.
    rope : int
        Rotary elements.
    scale : float
        What one stored unit of ``fp8``, or one scale of ``nvfp4``, is worth.

    Returns
    -------
    tuple of torch.Tensor, uint8, shape (n, region_bytes)
        On the device of `entries`.

    Raises
    ------
    InvalidArgument
        If `entries` is not a matrix, or the dtype is none of DeepSeek-V4's.
    """
    import torch

    _check("encode_entries", kv_dtype)
    if entries.ndim != 2:
        raise InvalidArgument(
            f"[encode_entries] entries must be (n, head_dim), got {tuple(entries.shape)}"
        )
    width = entries.shape[1]
    if kv_dtype != "fp8_ds_mla":
        return encode_latents(entries, kv_dtype, rank=width - rope, scale=scale)
    plain, rotary = entries[:, : width - rope].to(torch.float32), entries[:, width - rope :]
    tiles = plain.reshape(len(plain), plain.shape[1] // _TILE, _TILE)
    amax = tiles.abs().amax(-1).clamp(min=_LEAST_AMAX)
    exponent = floats.exponent_at_least(floats.divide(amax, floats.E4M3_MAX))
    codes = floats.to_e4m3((tiles / floats.power_of_two(exponent)[..., None]).flatten(1))
    data = torch.cat([codes, floats.to_bytes(rotary.to(torch.bfloat16))], 1)
    return data, torch.nn.functional.pad(floats.to_e8m0(exponent), (0, 1))


def decode_entries(
    record: Record, kv_dtype: KvDtype, *, head_dim: int, rope: int, scale: float = 1.0
) -> torch.Tensor:
    """The elements of entries, float32 ``[n, head_dim]``; parameters as `encode_entries`."""
    import torch

    _check("decode_entries", kv_dtype)
    plain = head_dim - rope
    if kv_dtype != "fp8_ds_mla":
        return decode_latents(record, kv_dtype, rank=plain, rope=rope, scale=scale)
    data, footers = record
    tiles = floats.from_e4m3(data[:, :plain]).view(len(data), plain // _TILE, _TILE)
    values = (tiles * floats.from_e8m0(footers[:, :-1])[..., None]).flatten(1)
    rotary = data[:, plain:].contiguous().view(torch.bfloat16).to(torch.float32)
    return torch.cat([values, rotary], 1)


def _check(function: str, kv_dtype: str) -> None:
    if kv_dtype not in ("bf16", "fp8", "fp8_ds_mla", "nvfp4"):
        raise InvalidArgument(
            f"[{function}] kv_dtype must be one of DeepSeek-V4's, got {kv_dtype!r}"
        )
