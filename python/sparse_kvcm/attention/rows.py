"""Rows that attention kernels read, of the slots that a manager selects: `sparse_arena_rows`.

A slot counts units over all pages of an arena, page * units_per_page + offset. Kernels count in
rows of their own: the same for FlashMLA and for every kernel that takes pages with a stride in
bytes; other numbers where pages are padded, or where one base address serves several layers.

DeepSeek-V4 reads its window beside the selected entries. Window rows and entry rows are one array
in two parts, as in `sparse_kvcm.deepseek_v4.indices.AttentionIndices`. DSA's window is a part of
the arena, and its slots already are among those that resolve gives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention import _requirements
from sparse_kvcm.attention.checks import check_tensor, check_vector, power_of_two

if TYPE_CHECKING:
    import torch

FUNCTION = "sparse_arena_rows"
DEBUG_ASSERT = "SPARSE_KVCM_DEBUG_ASSERT"
_LIMIT = 2**31  # rows are int32, which is what kernels take
_BLOCK = 512  # columns of a program: an access of 16 bytes for each of 128 threads


class UncoveredUnitError(RuntimeError):
    """A selected unit has no row, so that attention would leave it out in silence.

    Attributes
    ----------
    row, position, ordinal : int
        Row of the Batch, or place in the launch where rows were not given; place in its selection;
        the unit.
    """

    def __init__(self, row: int, position: int, ordinal: int, missing: int) -> None:
        super().__init__(
            f"[{FUNCTION}] every selected unit must have a row, got {missing} without one; the "
            f"first: row {row}, position {position}, ordinal {ordinal}"
        )
        self.row, self.position, self.ordinal = row, position, ordinal


@dataclass(frozen=True)
class RowForm:
    """How a kernel counts the rows of an arena or a pool.

    The unit at slot s is row ``first + s // units_per_page * page_stride + s % units_per_page *
    unit_stride``.

    Attributes
    ----------
    units_per_page : int
    num_slots : int
        Slots that there are: pages * units_per_page, the trash page included.
    page_stride : int, optional
        Rows from page to page, such as 65 rows of 576 B where 64 units of 576 + 8 B fill 37,440.
        None: units_per_page.
    unit_stride : int
        Rows from unit to unit.
    first : int
        Row of slot 0: where the layer begins behind the kernel's base address.

    Raises
    ------
    InvalidArgument
        If a row would not fit into int32, or rows of units would coincide.
    """

    units_per_page: int
    num_slots: int
    page_stride: int | None = None
    unit_stride: int = 1
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("units_per_page", "unit_stride"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("num_slots", "first"):
            _check_at_least(name, getattr(self, name), 0)
        least = (self.units_per_page - 1) * self.unit_stride + 1
        _check_at_least("page_stride", self.rows_per_page, least)
        last = self.first + (self.num_slots // self.units_per_page + 1) * self.rows_per_page
        if last > _LIMIT:
            raise InvalidArgument(
                f"[RowForm] rows must be < 2^31, which kernels take, got up to {last - 1} for "
                f"{self.num_slots} slots"
            )

    @property
    def rows_per_page(self) -> int:
        """`page_stride`, or what it stands for."""
        return self.units_per_page if self.page_stride is None else self.page_stride


@dataclass(frozen=True)
class WindowRows:
    """The window of each row: the newest tokens, by page table.

    Attributes
    ----------
    table : torch.Tensor, int32, shape (b, pages)
        Slots of the window's layer group in launch order, -1 = none.
    lengths : torch.Tensor, int32, shape (b,)
        Tokens of each, new ones included; 0 is padding.
    width : int
        Tokens of a window, columns of the result.
    tokens_per_page : int
    num_pages : int
        Pages that the kernel's buffer has; page indices are below it.
    scale, position : int
        A layer's page index is slot * scale + position, as in mode PER_LAYER; 1 and 0 where the
        table has page indices.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    width: int
    tokens_per_page: int
    num_pages: int
    scale: int = 1
    position: int = 0


def sparse_arena_rows(
    slots: torch.Tensor,
    form: RowForm,
    *,
    window: WindowRows | None = None,
    out: torch.Tensor | None = None,
    selection: torch.Tensor | None = None,
    batch_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn slots into the rows that an attention kernel reads, in one launch.

    Can be captured in a CUDA graph once it has run with arrays of these shapes.

    Parameters
    ----------
    slots : torch.Tensor, int32 or int64, shape (b, k)
        As a manager's `select` gives them, rows at any stride. -1, and what is no slot of the
        buffer, gives -1.
    form : RowForm
    window : WindowRows, optional
        Its rows come first: columns [0, width), oldest first, -1 behind them.
    out : torch.Tensor, int32, shape (b, width + k), optional
        Where the result goes; None: a new one.
    selection : torch.Tensor, int32, shape (b, k), optional
        What `slots` were selected by. Read only with SPARSE_KVCM_DEBUG_ASSERT=1 in the
        environment: every unit in it must then have a row. That waits for the device, so nothing
        is checked while a graph is captured.
    batch_rows : torch.Tensor, int32, shape (b,), optional
        Row of each launch position, -1 for padding, whose selection is then not checked.

    Returns
    -------
    torch.Tensor, int32, shape (b, width + k)

    Raises
    ------
    InvalidArgument
        If an argument does not fit.
    UncoveredUnitError
        See `selection`.
    """
    import torch

    width = _check(slots, form, window, out, selection, batch_rows)
    b, k = slots.shape
    if out is None:
        out = torch.empty((b, width + k), dtype=torch.int32, device=slots.device)
    kernels = _requirements.kernels("rows")
    block = min(_BLOCK, power_of_two(max(width, k)))
    window_blocks = -(-width // block)
    grid = (b, window_blocks - (-k // block))
    with _requirements.launches_on(FUNCTION, "slots", slots):
        if b and grid[1]:
            kernels.arena_rows[grid](
                slots,
                out,
                window.table if window else slots,
                window.lengths if window else slots,
                k,
                form.num_slots,
                form.first,
                slots.stride(0),
                out.stride(0),
                window.table.stride(0) if window else 0,
                window.table.shape[1] if window else 0,
                window.scale if window else 1,
                window.position if window else 0,
                window.num_pages if window else 0,
                UNITS=form.units_per_page,
                PAGE_STRIDE=form.rows_per_page,
                UNIT_STRIDE=form.unit_stride,
                WINDOW=width,
                WINDOW_UNITS=window.tokens_per_page if window else 1,
                WINDOW_BLOCKS=window_blocks,
                BLOCK=block,
            )
    if selection is not None and os.environ.get(DEBUG_ASSERT) == "1":
        _check_coverage(out[:, width:], selection, batch_rows)
    return out


def _check(
    slots: torch.Tensor,
    form: RowForm,
    window: WindowRows | None,
    out: torch.Tensor | None,
    selection: torch.Tensor | None,
    batch_rows: torch.Tensor | None,
) -> int:
    """Columns of the window, once all arguments are known to fit."""
    check_tensor(FUNCTION, "slots", slots, ("int32", "int64"), (None, None))
    b, k = slots.shape
    device = slots.device
    width = 0
    if window is not None:
        width = window.width
        for name in ("width", "tokens_per_page", "scale"):
            _check_at_least(f"window.{name}", getattr(window, name), 1)
        for name in ("num_pages", "position"):
            _check_at_least(f"window.{name}", getattr(window, name), 0)
        check_tensor(FUNCTION, "window.table", window.table, ("int32",), (b, None), device)
        check_vector(FUNCTION, "window.lengths", window.lengths, ("int32",), b, device)
        if window.num_pages * window.tokens_per_page > _LIMIT:
            raise InvalidArgument(
                f"[{FUNCTION}] window rows must be < 2^31, which kernels take, got "
                f"{window.num_pages} pages of {window.tokens_per_page}"
            )
    if out is not None:
        check_tensor(FUNCTION, "out", out, ("int32",), (b, width + k), device)
        if b > 1 and out.stride(0) < width + k:
            raise InvalidArgument(
                f"[{FUNCTION}] out must have rows of its own, got strides {out.stride()}"
            )
    if selection is not None:
        check_tensor(FUNCTION, "selection", selection, ("int32", "int64"), (b, k), device)
    if batch_rows is not None:
        check_vector(FUNCTION, "batch_rows", batch_rows, ("int32",), b, device)
    return width


def _check_coverage(
    rows: torch.Tensor, selection: torch.Tensor, batch_rows: torch.Tensor | None
) -> None:
    import torch

    if rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    missing = (selection >= 0) & (rows < 0)
    if batch_rows is not None:
        missing &= (batch_rows >= 0)[:, None]
    if not bool(missing.any()):
        return
    place, position = missing.nonzero()[0].tolist()
    row = place if batch_rows is None else int(batch_rows[place])
    raise UncoveredUnitError(row, position, int(selection[place, position]), int(missing.sum()))


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"[{FUNCTION}] {name} must be an int >= {least}, got {value!r}")
