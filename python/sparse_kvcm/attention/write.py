"""The write target: a step's new units, quantised and put into their slots, by one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention import _requirements
from sparse_kvcm.attention.checks import (
    check_region,
    check_tensor,
    check_vector,
    power_of_two,
)
from sparse_kvcm.attention.layouts import RecordLayout, Region

if TYPE_CHECKING:
    import torch

FUNCTION = "write_latents"
_FLOATS = ("bfloat16", "float16", "float32")
_LEAST = {  # of the largest element of a tile, as the codecs have it
    "fp32": 1.1754943508222875e-38 * 448,
    "e8m0": 1e-4,
}


def write_latents(
    layout: RecordLayout,
    buffers: Sequence[torch.Tensor],
    latents: torch.Tensor,
    slots: torch.Tensor,
    *,
    rotary: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Write units to slots, with the bytes of the codecs.

    Can be captured in a CUDA graph once it has run with arrays of these shapes.

    Parameters
    ----------
    layout : RecordLayout
    buffers : sequence of torch.Tensor
        An arena, or the pools of each region; see `RecordLayout.regions`.
    latents : torch.Tensor, BF16, FP16 or FP32, shape (n, width)
        Elements, finite, the rotary ones last, rows at any stride. Arithmetic is FP32.
    slots : torch.Tensor, int32 or int64, shape (n,), any stride
        Slot of each, distinct, such as write slots of a `resolve` or rows of a page table. Nothing
        is written for -1, and for what is no slot of the buffers.
    rotary : torch.Tensor, shape (n, rope), optional
        The rotary elements, where a model has them apart; `latents` are then (n, width - rope).
    scale : float
        As in the codecs: what one stored unit of a format without an own scale is worth.

    Raises
    ------
    InvalidArgument
        If an argument does not fit.
    """
    regions = layout.regions(buffers)
    _check(layout, regions, latents, slots, rotary, scale)
    rest = latents[:, layout.width - layout.rope :] if rotary is None else rotary
    data, scales = (
        regions[layout.data.region],
        regions[layout.scales.region if layout.scales else 0],
    )
    kernels = _requirements.kernels("write")
    with _requirements.launches_on(FUNCTION, "latents", latents):
        if len(latents):
            kernels.write_units[(len(latents),)](
                latents,
                rest,
                slots,
                data.pages,
                scales.pages,
                latents.stride(0),
                rest.stride(0),
                slots.stride(0),
                min(len(one.pages) for one in regions) * layout.units_per_page,
                float(scale),
                6.0 * scale if layout.data.format == "e2m1" else 448.0,
                _LEAST.get(layout.scales.format, 0.0) if layout.scales else 0.0,
                data.page_stride,
                data.offset,
                scales.page_stride,
                scales.offset,
                DATA_BYTES=data.unit_bytes,
                SCALE_BYTES=scales.unit_bytes,
                SPLIT=layout.data.count if rotary is None else layout.width - layout.rope,
                **_constants(layout),
            )


def _constants(layout: RecordLayout) -> dict[str, int | str]:
    """What of a layout is compiled into the kernel."""
    scales, rotary = layout.scales, layout.rotary
    tiles = scales.count if scales else 0
    padding = 1 if scales and scales.format == "e8m0" else 0
    return {
        "UNITS": layout.units_per_page,
        "DATA_FORMAT": layout.data.format,
        "DATA_AT": layout.data.offset,
        "COUNT": layout.data.count,
        "TILE": layout.tile,
        "TILES": tiles,
        "SCALE_FORMAT": scales.format if scales else "",
        "SCALE_AT": scales.offset if scales else 0,
        "SCALE_COLUMNS": layout.scale_columns,
        "ROPE": layout.rope if rotary else 0,
        "ROTARY_FORMAT": rotary.format if rotary else "",
        "ROTARY_AT": rotary.offset if rotary else 0,
        "BLOCK": power_of_two(tiles + padding if scales else layout.data.count),
        "ROPE_BLOCK": power_of_two(layout.rope),
    }


def _check(
    layout: RecordLayout,
    regions: Sequence[Region],
    latents: torch.Tensor,
    slots: torch.Tensor,
    rotary: torch.Tensor | None,
    scale: float,
) -> None:
    width = layout.width if rotary is None else layout.width - layout.rope
    check_tensor(FUNCTION, "latents", latents, _FLOATS, (None, width))
    n, device = len(latents), latents.device
    if rotary is not None:
        check_tensor(FUNCTION, "rotary", rotary, _FLOATS, (n, layout.rope), device)
    check_vector(FUNCTION, "slots", slots, ("int32", "int64"), n, device, any_stride=True)
    for region in regions:
        check_region(FUNCTION, region, device)
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgument(f"[{FUNCTION}] scale must be positive and finite, got {scale}")
