"""Slots to rows: what `sparse_kvcm.attention.rows` launches."""

from __future__ import annotations

import triton
import triton.language as tl


# What differs from layer to layer must not choose another kernel: a graph could not compile it.
@triton.jit(
    do_not_specialize=["first", "num_slots", "window_scale", "window_position", "window_pages"]
)
def arena_rows(
    slots,
    out,
    table,
    lengths,
    k,
    num_slots,
    first,
    slots_stride,
    out_stride,
    table_stride,
    table_width,
    window_scale,
    window_position,
    window_pages,
    UNITS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_UNITS: tl.constexpr,
    WINDOW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of columns of one row; the first WINDOW_BLOCKS blocks of a row are its window."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < WINDOW_BLOCKS:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(lengths + row)
        position = tl.maximum(length - WINDOW, 0) + columns
        column = position // WINDOW_UNITS
        exists = (columns < WINDOW) & (position < length) & (column < table_width)
        window_slot = tl.load(table + row * table_stride + column, mask=exists, other=-1)
        page = window_slot.to(tl.int64) * window_scale + window_position
        exists = exists & (window_slot >= 0) & (page < window_pages)
        rows = tl.where(exists, page * WINDOW_UNITS + position % WINDOW_UNITS, -1).to(tl.int32)
        tl.store(out + row * out_stride + columns, rows, mask=columns < WINDOW)
    else:
        columns = (block - WINDOW_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(slots + row * slots_stride + columns, mask=columns < k, other=-1)
        exists = (wide >= 0) & (wide < num_slots)
        slot = wide.to(tl.int32)
        rows = slot // UNITS * PAGE_STRIDE + slot % UNITS * UNIT_STRIDE + first
        rows = tl.where(exists, rows, -1)
        tl.store(out + row * out_stride + WINDOW + columns, rows, mask=columns < k)
