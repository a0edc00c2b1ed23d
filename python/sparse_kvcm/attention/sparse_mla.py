"""Attention of decode steps over selected units, straight from their pages: `sparse_mla_decode`.

One function for DSA (keys are latents and rotary elements, values the latents) and DeepSeek-V4
(keys are values; a window beside compressed entries, sinks), for every stored layout, over the
arena of an offloading manager and over pools alike: all that it knows of memory is where pages lie
and which rows to read. So both give the same bits for the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention import _requirements
from sparse_kvcm.attention.layouts import Part, RecordLayout, Region
from sparse_kvcm.attention.mla_checks import check_decode
from sparse_kvcm.attention.mla_tuning import (
    Tuning,
    WorkPlan,
    heads_of_program,
    plan_work,
    tuning_of,
)

if TYPE_CHECKING:
    import torch

FUNCTION = "sparse_mla_decode"
LOG2_E = math.log2(math.e)
_ALIGNMENT = 16  # of one load


@dataclass(frozen=True)
class KeyPart:
    """Some of the units that queries attend to.

    Attributes
    ----------
    pool : torch.Tensor or sequence of torch.Tensor
        Pages, as `RecordLayout.regions` takes them: an arena, or the buffers of a pool.
    rows : torch.Tensor, int32, shape (b, k)
        Units of each query: page * units_per_page + place in the page, -1 anywhere = none. A unit
        that is named twice counts twice.
    layout : RecordLayout
    kv_scale : float
        As in the codecs, for layouts with a `tensor_scale`.
    """

    pool: torch.Tensor | Sequence[torch.Tensor]
    rows: torch.Tensor
    layout: RecordLayout
    kv_scale: float = 1.0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The pool's buffers."""
        import torch

        return [self.pool] if isinstance(self.pool, torch.Tensor) else list(self.pool)

    @property
    def unit(self) -> float:
        """What a stored 1.0 is worth."""
        return self.kv_scale if self.layout.tensor_scale else 1.0


def sparse_mla_decode(
    q: torch.Tensor,
    pool: torch.Tensor | Sequence[torch.Tensor],
    rows: torch.Tensor,
    *,
    layout: RecordLayout,
    softmax_scale: float,
    kv_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    window: KeyPart | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected units of each query.

    Nothing waits for a device and shapes depend on shapes alone, so a graph can capture it. Bytes
    of units that no row names are never looked at.

    Parameters
    ----------
    q : torch.Tensor, bfloat16, shape (b, heads, width)
        Absorbed queries: 512 + 64 elements in DSA, 512 in DeepSeek-V4, at multiples of 16 bytes.
    pool, rows, layout, kv_scale
        As in `KeyPart`.
    softmax_scale : float
    sinks : torch.Tensor, float32, shape (heads,), optional
        ``exp(sink)`` is added to the sum of each head's weights.
    window : KeyPart, optional
        More units, of as wide a layout, such as a DeepSeek-V4 layer's window.
    out : torch.Tensor, shape (b, heads, value_width), optional
        bfloat16, float16 or float32.
    lse : torch.Tensor, float32, shape (b, heads), optional
    workspace : torch.Tensor, uint8, optional
        At least `workspace_bytes`; written, and free again when the launch has run.
    tuning : Tuning, optional
        None: that of `sparse_kvcm.attention.mla_tuning`. Another one may change the last bits.

    Returns
    -------
    torch.Tensor, shape (b, heads, value_width)
        `out`, or a new one in bfloat16. Zeros for a query without units.
    torch.Tensor, float32, shape (b, heads)
        Natural logarithm of the sum of weights, without the sink, by which outputs without sinks
        can be merged; minus infinity for a query without units.

    Raises
    ------
    InvalidArgument
        Before any launch, naming the argument. Rows are not looked at: they lie on the device.
    """
    import torch

    parts = [KeyPart(pool, rows, layout, kv_scale)]
    if window is not None:
        parts.insert(0, window)
    check_decode(FUNCTION, q, parts, softmax_scale, sinks, out, lse)
    b, heads, _ = q.shape
    tuned = tuning or tuning_of(heads, layout.name)
    work = plan_work(b, heads, tuple(part.rows.shape[1] for part in parts), tuned) if b else None
    shape = (b, heads, layout.value_width)
    out = torch.empty(shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    if work is not None:
        pieces = _pieces(q, work, layout, workspace)
        _launch(q, parts, softmax_scale, sinks, out, lse, pieces, work, tuned)
    return out, lse


def workspace_bytes(
    b: int,
    heads: int,
    layout: RecordLayout,
    k: int,
    window: int | None = None,
    tuning: Tuning | None = None,
) -> int:
    """Bytes of a workspace for b queries and selections of k, beside a window of so many."""
    widths = (k,) if window is None else (window, k)
    if b == 0:
        return 0
    work = plan_work(b, heads, widths, tuning or tuning_of(heads, layout.name))
    return work.workspace_bytes(heads, layout.value_width)


def _pieces(
    q: torch.Tensor, work: WorkPlan, layout: RecordLayout, workspace: torch.Tensor | None
) -> torch.Tensor:
    """Memory of pieces, float32, of at least one element."""
    import torch

    heads = q.shape[1]
    size = work.workspace_bytes(heads, layout.value_width)
    if workspace is None:
        return torch.empty(max(size // 4, 1), dtype=torch.float32, device=q.device)
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
        raise InvalidArgument(
            f"[{FUNCTION}] workspace must be contiguous uint8 (bytes,), got {workspace.dtype} "
            f"{tuple(workspace.shape)}"
        )
    if workspace.device != q.device or workspace.data_ptr() % _ALIGNMENT:
        raise InvalidArgument(
            f"[{FUNCTION}] workspace must lie on {q.device} at a multiple of {_ALIGNMENT} bytes, "
            f"got {workspace.device}, address {workspace.data_ptr():#x}"
        )
    if workspace.numel() < size:
        raise InvalidArgument(
            f"[{FUNCTION}] workspace must have {size} bytes, see workspace_bytes, "
            f"got {workspace.numel()}"
        )
    return workspace[: workspace.numel() // 4 * 4].view(torch.float32)


def _launch(
    q: torch.Tensor,
    parts: list[KeyPart],
    softmax_scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: torch.Tensor,
    work: WorkPlan,
    tuning: Tuning,
) -> None:
    kernels = _requirements.kernels("mla")
    layout = parts[-1].layout
    b, heads, _ = q.shape
    width = layout.value_width
    first, last = _Bound(parts[0]), _Bound(parts[-1])
    sums = pieces[work.pieces * heads * width :] if work.pieces else pieces
    stored = (parts[0].unit, parts[-1].unit)
    units = (
        *(one * softmax_scale * LOG2_E for one in stored),
        *(1.0 / one for one in stored),
        stored[0] / stored[1],
        stored[1],
    )
    outputs = (sinks, out, out.stride(0), out.stride(1), lse, lse.stride(0), pieces, sums)
    block_of_heads = heads_of_program(heads)
    halves = any(part.layout.data.format == "e2m1" for part in parts)
    import triton

    with _requirements.launches_on(FUNCTION, "q", q):
        kernels.sparse_mla_kernel[(work.programs, math.ceil(heads / block_of_heads))](
            q, q.stride(0), q.stride(1), heads, b, work.blocks[0], sum(work.blocks),
            work.per_program, *units, *first.arguments, *last.arguments, *outputs,
            **{f"A_{name}": value for name, value in first.constants.items()},
            **{f"B_{name}": value for name, value in last.constants.items()},
            PARTS=len(parts), WIDTH=width, ROPE=layout.width - width, HEADS=block_of_heads,
            BLOCK=tuning.block, HALVES=halves, WIDEN=triton.knobs.runtime.interpret,
            num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        )  # fmt: skip
        if work.pieces:
            kernels.merge_kernel[(b, heads)](
                *outputs, heads, sum(work.blocks), work.per_program, stored[1], WIDTH=width,
                HALVES=halves, num_warps=4,
            )  # fmt: skip


class _Bound:
    """What the kernel is told of a part: where its units lie, and how they are stored.

    Constants follow from the layout alone, so that one kernel serves wherever pages lie.
    """

    def __init__(self, part: KeyPart) -> None:
        layout = part.layout
        regions = layout.regions(part.buffers)
        self.arguments: list[Any] = [part.rows, part.rows.stride(0), part.rows.shape[1]]
        apart = layout.rotary is not None and layout.width == layout.value_width
        self.constants: dict[str, int | str] = {
            "FORMAT": layout.data.format,
            "SCALE": "none" if layout.scales is None else layout.scales.format,
            "ROTARY": "none" if layout.rotary is None else layout.rotary.format,
            "TILE": max(layout.tile, 1),
            "COLUMNS": layout.scale_columns,
            "TOTAL": 1 if layout.scales is None else layout.scales.count,
            "PLAIN": layout.data.count if apart else layout.value_width,
            "PAGE": layout.units_per_page,
        }
        for name in ("data", "scales", "rotary"):
            found = getattr(layout, name)
            self._bind(layout, name, found or layout.data, regions)

    def _bind(self, layout: RecordLayout, name: str, part: Part, regions: list[Region]) -> None:
        import torch

        region = regions[part.region]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(part.format, torch.uint8)
        natural = math.gcd(_ALIGNMENT, region.unit_bytes, part.offset)
        begin = region.pages.data_ptr() + region.offset + part.offset
        if begin % natural or region.page_stride % natural:
            raise InvalidArgument(
                f"[{FUNCTION}] pages of {layout.name} must have their {name} at multiples of "
                f"{natural} bytes, got address {begin:#x}, page stride {region.page_stride}"
            )
        size = dtype.itemsize
        self.arguments += [
            region.pages.view(dtype),
            region.page_stride // size,
            (region.offset + part.offset) // size,
        ]
        short = {"data": "DATA", "scales": "SCALE", "rotary": "ROTARY"}[name]
        self.constants[f"{short}_UNIT"] = region.unit_bytes // size
        self.constants[f"{short}_ALIGN"] = natural
