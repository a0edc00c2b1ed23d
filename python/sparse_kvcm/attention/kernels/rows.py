"""Slots to rows: what `sparse_kvcm.attention.rows` launches."""

from __future__ import annotations

import triton
import triton.language as tl


# What differs from layer to layer must not choose another kernel: a graph could not compile it.
@triton.jit(do_not_specialize=["first", "num_slots", "tail_scale", "tail_position", "tail_pages"])
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
    tail_scale,
    tail_position,
    tail_pages,
    UNITS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_UNITS: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of columns of one row; the first TAIL_BLOCKS blocks of a row are its tail."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < TAIL_BLOCKS:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(lengths + row)
        position = tl.maximum(length - TAIL, 0) + columns
        column = position // TAIL_UNITS
        exists = (columns < TAIL) & (position < length) & (column < table_width)
        tail_slot = tl.load(table + row * table_stride + column, mask=exists, other=-1)
        page = tail_slot.to(tl.int64) * tail_scale + tail_position
        exists = exists & (tail_slot >= 0) & (page < tail_pages)
        rows = tl.where(exists, page * TAIL_UNITS + position % TAIL_UNITS, -1).to(tl.int32)
        tl.store(out + row * out_stride + columns, rows, mask=columns < TAIL)
    else:
        columns = (block - TAIL_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(slots + row * slots_stride + columns, mask=columns < k, other=-1)
        exists = (wide >= 0) & (wide < num_slots)
        slot = wide.to(tl.int32)
        rows = slot // UNITS * PAGE_STRIDE + slot % UNITS * UNIT_STRIDE + first
        rows = tl.where(exists, rows, -1)
        tl.store(out + row * out_stride + TAIL + columns, rows, mask=columns < k)
