"""Selected units, side by side: what `sparse_kvcm.attention.scratch` launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots", "num_rows", "offset"])
def gather_region(
    slots,
    pages,
    out,
    k,
    num_rows,
    num_slots,
    slots_stride,
    page_stride,
    offset,
    UNITS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of one region, in words of 4 bytes; zeros where there is no unit."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    source = slots + row // k * slots_stride + row % k
    slot = tl.load(source, mask=row < num_rows, other=-1).to(tl.int64)
    exists = (slot >= 0) & (slot < num_slots)
    words = tl.arange(0, BLOCK)
    unit = pages + slot // UNITS * page_stride + offset + slot % UNITS * (4 * WORDS)
    place = unit.to(tl.pointer_type(tl.int32))[:, None] + words[None, :]
    mask = (words < WORDS)[None, :]
    values = tl.load(place, mask=exists[:, None] & mask, other=0)
    target = out.to(tl.pointer_type(tl.int32)) + row * WORDS
    tl.store(target[:, None] + words[None, :], values, mask=mask)
