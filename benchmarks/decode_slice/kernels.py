"""Triton kernels of the slice that are no part of the library: indexer, top-k, page look-ups.

Imported where a GPU is used; `device_ops` has the same in torch.
"""

# mypy: ignore-errors
# Triton's language has no types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_scores(
    queries, weights, pages, table, rows, lengths, scores,
    page_stride, scale_offset, table_stride, scores_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK x STEPS units: sum over heads of weight x relu(query . key) x scale."""
    place = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + place)
    begin = tl.program_id(1) * BLOCK * STEPS
    if begin < length:
        row = tl.load(rows + place).to(tl.int64)
        heads, width = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        query = tl.load(queries + (place * HEADS + heads[:, None]) * WIDTH + width[None, :])
        weight = tl.load(weights + place * HEADS + heads)
        for step in range(STEPS):
            unit = begin + step * BLOCK + tl.arange(0, BLOCK)
            inside = unit < length
            slot = tl.load(table + row * table_stride + unit // UNITS, mask=inside, other=0)
            page = pages + tl.maximum(slot, 0).to(tl.int64) * page_stride
            at = page + unit % UNITS * WIDTH
            codes = tl.load(at[:, None] + width[None, :], mask=inside[:, None], other=0)
            keys = codes.to(tl.float8e4nv, bitcast=True)
            scale_at = (page + scale_offset + unit % UNITS * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(scale_at, mask=inside, other=0.0)
            dots = tl.maximum(tl.dot(keys, tl.trans(query)), 0.0)
            score = tl.sum(dots * weight[None, :], 1) * scale
            tl.store(scores + place * scores_stride + unit, score, mask=inside)


@triton.jit
def _keys(scores, unit, length):
    """Scores as uint32 that compare as they do; 0 outside."""
    inside = unit < length
    bits = tl.load(scores + unit, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(inside, flipped, 0)


@triton.jit
def top_k(scores, lengths, out, scores_stride, K: tl.constexpr, CHUNK: tl.constexpr):
    """The K best units of a row, by the digits of the K-th best score; in no order, -1 = none."""
    place = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + place)
    scores += place * scores_stride
    out += place * K
    threshold = tl.full((), 0, tl.uint32)
    wanted = K
    digits = tl.arange(0, 512)  # of 8 bits; 256 is for keys that are out already
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((512,), tl.int32)
        for begin in range(0, length, CHUNK):
            unit = begin + tl.arange(0, CHUNK)
            keys = _keys(scores, unit, length)
            same = (((keys ^ threshold) >> shift) >> 8) == 0
            digit = ((keys >> shift) & 255).to(tl.int32)
            counts += tl.histogram(tl.where(same & (unit < length), digit, 256), 512)
        counts = tl.where(digits < 256, counts, 0)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        best = tl.max(tl.where((at_least >= wanted) & (digits < 256), digits, 0), 0)
        wanted -= tl.sum(tl.where((digits > best), counts, 0), 0)
        threshold = threshold | (best.to(tl.uint32) << shift)
    better = 0
    for begin in range(0, length, CHUNK):
        unit = begin + tl.arange(0, CHUNK)
        above = (_keys(scores, unit, length) > threshold) & (unit < length)
        position = better + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(out + position, unit, mask=above & (position < K))
        better += tl.sum(above.to(tl.int32))
    for begin in range(0, length, CHUNK):
        unit = begin + tl.arange(0, CHUNK)
        equal = (_keys(scores, unit, length) == threshold) & (unit < length)
        position = better + tl.cumsum(equal.to(tl.int32), 0) - 1
        tl.store(out + position, unit, mask=equal & (position < K))
        better += tl.sum(equal.to(tl.int32))


@triton.jit
def look_up(
    ordinals, table, rows, out, k, ordinals_stride, table_stride,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of ordinals by a page table; -1 for ordinal -1 and in padding."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place).to(tl.int64)
    ordinal = tl.load(ordinals + place * ordinals_stride + column, mask=column < k, other=-1)
    ordinal = tl.where(row >= 0, ordinal, -1)
    exists = ordinal >= 0
    page = tl.load(table + row * table_stride + ordinal // UNITS, mask=exists, other=-1)
    slot = tl.where(page >= 0, page * UNITS + ordinal % UNITS, -1)
    tl.store(out + place * k + column, slot, mask=column < k)


@triton.jit
def write_units(
    record, slots, pages, page_stride, offset, slots_stride,
    BYTES: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A region of a unit per program; slot -1 is skipped."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + place * slots_stride).to(tl.int64)
    if slot >= 0:
        byte = tl.arange(0, BLOCK)
        values = tl.load(record + place * BYTES + byte, mask=byte < BYTES)
        at = pages + slot // UNITS * page_stride + offset + slot % UNITS * BYTES
        tl.store(at + byte, values, mask=byte < BYTES)
