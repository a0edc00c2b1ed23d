"""What `sparse_mla_decode` refuses before it launches anything."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention.layouts import RecordLayout

if TYPE_CHECKING:
    import torch

    from sparse_kvcm.attention.sparse_mla import KeyPart

_ALIGNMENT = 16
_LEAST_WIDTH = 16  # of a matrix product


def check_decode(
    function: str,
    q: torch.Tensor,
    parts: Sequence[KeyPart],
    softmax_scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Check all arguments but the bytes of pages and rows, which lie on the device."""
    import torch

    wrong = partial(_wrong, function)
    for name, one in (("q", q), ("sinks", sinks), ("out", out), ("lse", lse)):
        if name == "q" or one is not None:
            _check_kind_of(function, name, one)
    for part in parts:
        got = getattr(part, "layout", part)
        if not isinstance(got, RecordLayout):
            raise wrong("layout", "a RecordLayout, of a KeyPart in a window", type(got).__name__)
    layout = parts[-1].layout
    if q.ndim != 3 or q.shape[1] < 1 or q.shape[2] != layout.width:
        raise wrong("q", f"(b, heads, {layout.width}) for {layout.name}", tuple(q.shape))
    if q.dtype != torch.bfloat16:
        raise wrong("q", "bfloat16", q.dtype)
    _check_rows_of(function, "q", q)
    if not _is_finite(softmax_scale):
        raise wrong("softmax_scale", "finite", softmax_scale)
    b, heads, _ = q.shape
    for part in parts:
        _check_part(function, q, part, layout.width, layout.value_width)
    shape = (b, heads, layout.value_width)
    if out is not None:
        if tuple(out.shape) != shape:
            raise wrong("out", str(shape), tuple(out.shape))
        if out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise wrong("out", "bfloat16, float16 or float32", out.dtype)
        _check_rows_of(function, "out", out)
        _check_apart(function, out)
    for name, one, wanted in (("lse", lse, shape[:2]), ("sinks", sinks, shape[1:2])):
        if one is None:
            continue
        if one.dtype != torch.float32 or tuple(one.shape) != wanted or not one.is_contiguous():
            raise wrong(name, f"contiguous float32 {wanted}", f"{one.dtype} {tuple(one.shape)}")
    for name, one in (("out", out), ("lse", lse), ("sinks", sinks)):
        if one is not None and one.device != q.device:
            raise wrong(name, f"on q's device, {q.device}", one.device)


def _check_part(
    function: str, q: torch.Tensor, part: KeyPart, width: int, value_width: int
) -> None:
    import torch

    wrong = partial(_wrong, function)
    layout, rows = part.layout, part.rows
    if not isinstance(part.pool, torch.Tensor | list | tuple):
        raise wrong("pool", "a torch.Tensor or a sequence of them", type(part.pool).__name__)
    for name, one in (("rows", rows), *(("pool", buffer) for buffer in part.buffers)):
        _check_kind_of(function, name, one)
    if (layout.width, layout.value_width) != (width, value_width):
        raise wrong(
            "layout", f"as wide as the other part's, {width}", f"{layout.name}, {layout.width}"
        )
    for name, size in (("value_width", value_width), ("rotary width", width - value_width)):
        if size and (size < _LEAST_WIDTH or size & (size - 1)):
            raise wrong(f"{name} of {layout.name}", f"a power of two from {_LEAST_WIDTH} on", size)
    if rows.dtype != torch.int32 or rows.ndim != 2 or len(rows) != len(q) or rows.shape[1] < 1:
        raise wrong("rows", f"int32 ({len(q)}, k) with k >= 1", f"{rows.dtype} {tuple(rows.shape)}")
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise wrong("rows", "contiguous within a row", f"strides {rows.stride()}")
    for name, one in (("rows", rows), *(("pool", buffer) for buffer in part.buffers)):
        if one.device != q.device:
            raise wrong(name, f"on q's device, {q.device}", one.device)
    if not (_is_finite(part.kv_scale) and part.kv_scale > 0):
        raise wrong("kv_scale", "finite and > 0", part.kv_scale)


def _check_kind_of(function: str, name: str, one: object) -> None:
    import torch

    if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
        got = getattr(one, "layout", type(one).__name__)
        raise InvalidArgument(f"[{function}] {name} must be a strided torch.Tensor, got {got}")


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _check_apart(function: str, out: torch.Tensor) -> None:
    """No two elements in one place: of outputs that are written there only one would stay."""
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < reach:
            raise InvalidArgument(
                f"[{function}] out must have a place for each element, got strides {out.stride()} "
                f"of {tuple(out.shape)}"
            )
        reach += max(size - 1, 0) * stride


def _check_rows_of(function: str, name: str, one: torch.Tensor) -> None:
    """Elements side by side, heads at multiples of 16 bytes: one load takes so many."""
    size = one.element_size()
    strides = [one.stride(i) * size for i in range(2) if one.shape[i] > 1]
    contiguous = one.stride(2) == 1 or one.shape[2] == 1
    if not contiguous or any(s % _ALIGNMENT for s in strides) or one.data_ptr() % _ALIGNMENT:
        raise InvalidArgument(
            f"[{function}] {name} must have contiguous elements, each head at a multiple of "
            f"{_ALIGNMENT} bytes, got strides {one.stride()}, address {one.data_ptr():#x}"
        )


def _wrong(function: str, name: str, wanted: str, got: object) -> InvalidArgument:
    return InvalidArgument(f"[{function}] {name} must be {wanted}, got {got}")
