"""Triton kernels of `sparse_mla`: attention of one query token over selected units.

The blocks of all rows, a row's first part before its second, are numbered one after the other and
cut into ranges of `per_program` blocks, one per program, so that every multiprocessor has the same
work whatever the batch. A program walks the rows of its range. A row that lies in it whole is
finished; of one that a border cuts each program writes a *piece*, in place ``program + row`` of the
workspace: along the ranges either the program or the row goes up, so places are distinct. The merge
adds the pieces of a row up in their order. Nothing depends on which program is first.

E2M1 has two elements in a byte. Where a part is stored so (HALVES), the columns of all operands are
the even elements and then the odd ones: two loads of the same bytes, and no exchange of elements
between threads, which the compiler gets wrong on its way into a dot.

Operands of dots are BF16, which stored elements are exactly, but for E4M3 with FP32 scales. Sums
are float32. Exponents are of base 2: m is the largest score of a head, mass the sum of its weights,
``2 ** (score - m)``. Under Triton's interpreter (WIDEN), which knows BF16 only as a type, dots are
of the same operands in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _find(pages, stride, offset, page, place, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to a part of each unit; ALIGN bytes, so that code is the same wherever pages lie."""
    return tl.multiple_of(pages + (page * stride + (place * UNIT + offset)), ALIGN)


@triton.jit
def _element(COUNT: tl.constexpr, HALVES: tl.constexpr):
    """The element of each column: in order, or the even ones before the odd ones."""
    column = tl.arange(0, COUNT)
    if HALVES:
        column = column % (COUNT // 2) * 2 + column // (COUNT // 2)
    return column


@triton.jit
def _from_e2m1(codes):
    """Four bits each, exact in float16, whose denormals stand for 0.5."""
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _to_bf16(values, WIDEN: tl.constexpr):
    """Round finite float32 to nearest, ties to even; the interpreter would cut bits off."""
    if WIDEN:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(tl.bfloat16)


@triton.jit
def _load_codes(data, exists, BEGIN, COUNT: tl.constexpr, FORMAT: tl.constexpr,
                HALVES: tl.constexpr):  # fmt: skip
    """COUNT elements of each unit as they are stored, [n, COUNT]: BF16 or, exactly, float16."""
    if HALVES:
        column = tl.arange(0, COUNT)
        half = column // (COUNT // 2)
        at = BEGIN // 2 + column % (COUNT // 2)  # pairs of elements
        if FORMAT == "bf16":
            pairs = data.to(tl.pointer_type(tl.uint32), bitcast=True)
        elif FORMAT == "e4m3":
            pairs = data.to(tl.pointer_type(tl.uint16), bitcast=True)
        else:
            pairs = data
        found = tl.load(pairs[:, None] + at[None, :], mask=exists[:, None], other=0)
        if FORMAT == "bf16":
            codes = (found >> (half * 16)[None, :]).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        elif FORMAT == "e4m3":
            codes = (found.to(tl.uint32) >> (half * 8)[None, :]).to(tl.uint8)
        else:
            codes = _from_e2m1(found.to(tl.int32) >> (half * 4)[None, :])
    else:
        at = BEGIN + tl.arange(0, COUNT)
        codes = tl.load(data[:, None] + at[None, :], mask=exists[:, None], other=0)
    if FORMAT == "e4m3":
        codes = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return codes


@triton.jit
def _load_scales(scales, exists, BEGIN, COUNT: tl.constexpr, FORMAT: tl.constexpr,
                 COLUMNS: tl.constexpr, TOTAL: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """COUNT scales of each unit from the BEGINth on, [n, COUNT], or twice those in HALVES."""
    i = BEGIN + tl.arange(0, 2 * COUNT if HALVES else COUNT) % COUNT
    place = i % COLUMNS * (TOTAL // COLUMNS) + i // COLUMNS
    found = tl.load(scales[:, None] + place[None, :], mask=exists[:, None], other=0)
    if FORMAT == "e4m3":
        found = found.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "e8m0":
        found = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _load_elements(data, scales, exists, BEGIN, COUNT: tl.constexpr, FORMAT: tl.constexpr,
                   SCALE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
                   TOTAL: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """COUNT elements of each unit from the BEGINth on, BF16 [n, COUNT], zeros of none."""
    values = _load_codes(data, exists, BEGIN, COUNT, FORMAT, HALVES)
    if SCALE != "none":
        SHARE: tl.constexpr = TILE // 2 if HALVES else TILE  # columns in a row with one scale
        found = _load_scales(scales, exists, BEGIN // TILE, COUNT // TILE, SCALE, COLUMNS, TOTAL,
                             HALVES)  # fmt: skip
        if found.dtype == tl.float32:
            values = values.to(tl.float32)
        tiles = tl.reshape(values, (values.shape[0], COUNT // SHARE, SHARE)) * found[:, :, None]
        values = tl.reshape(tiles, (values.shape[0], COUNT))
    if values.dtype != tl.bfloat16:
        values = _to_bf16(values.to(tl.float32), WIDEN)
    return values


@triton.jit
def _dot(a, b, c, WIDEN: tl.constexpr):
    if WIDEN:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        c = tl.dot(a, b, c)
    return c


@triton.jit
def _attend(
    acc, m, mass, q, q_rope, unit, rope_unit, begin, end,
    rows, k, data, data_stride, data_offset, scales, scale_stride, scale_offset,
    rotary, rotary_stride, rotary_offset,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, ROTARY: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, TOTAL: tl.constexpr, PLAIN: tl.constexpr,
    PAGE: tl.constexpr, DATA_UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    ROTARY_UNIT: tl.constexpr, DATA_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ROTARY_ALIGN: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to blocks [begin, end) of one part of a row; `unit` is what a dot is worth."""
    for block in range(begin, end):
        column = block * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(rows + column, mask=column < k, other=-1)
        exists = row >= 0
        slot = tl.where(exists, row, 0)
        page, place = (slot // PAGE).to(tl.int64), slot % PAGE
        data_at = _find(data, data_stride, data_offset, page, place, DATA_UNIT, DATA_ALIGN)
        scale_at = data_at
        if SCALE != "none":
            scale_at = _find(scales, scale_stride, scale_offset, page, place, SCALE_UNIT,
                             SCALE_ALIGN)  # fmt: skip
        keys = _load_elements(data_at, scale_at, exists, 0, WIDTH, FORMAT, SCALE, TILE, COLUMNS,
                              TOTAL, HALVES, WIDEN)  # fmt: skip
        if ROTARY != "none":
            rotary_at = _find(rotary, rotary_stride, rotary_offset, page, place, ROTARY_UNIT,
                              ROTARY_ALIGN)  # fmt: skip
            if PLAIN < WIDTH:  # rotary elements are the last of the value
                d = _element(WIDTH, HALVES)
                last = tl.load(
                    rotary_at[:, None] + (d - PLAIN)[None, :],
                    mask=exists[:, None] & (d >= PLAIN)[None, :],
                    other=0,
                )
                keys = tl.where((d < PLAIN)[None, :], keys, last)
        score = tl.zeros((q.shape[0], BLOCK), tl.float32)
        if ROPE > 0:
            if ROTARY == "none":
                rope = _load_elements(data_at, scale_at, exists, WIDTH, ROPE, FORMAT, SCALE, TILE,
                                      COLUMNS, TOTAL, HALVES, WIDEN)  # fmt: skip
            else:
                rope = _load_elements(rotary_at, rotary_at, exists, 0, ROPE, ROTARY, "none", 1, 1,
                                      1, HALVES, WIDEN)  # fmt: skip
            score = _dot(q_rope, tl.trans(rope), score, WIDEN)
            if ROTARY == "e4m3":  # stored as it is, where the others count in a scale
                score *= rope_unit
        score = _dot(q, tl.trans(keys), score, WIDEN) * unit
        score = tl.where(exists[None, :], score, float("-inf"))
        highest = tl.maximum(m, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(m - base)
        mass = mass * fade + tl.sum(weight, 1)
        acc = _dot(_to_bf16(weight, WIDEN), keys, acc * fade[:, None], WIDEN)
        m = highest
    return acc, m, mass


@triton.jit
def _finish(acc, m, mass, sink):
    """Outputs and natural logarithms of sums, of float32 [heads, ...] and sinks [heads]."""
    some = mass != 0  # it is at least 1, or NaN, which is passed on
    base = tl.where(some, m, 0.0)
    total = mass + tl.exp2(sink * _LOG2_E - base)
    scale = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    return scale, tl.where(some, (m + tl.log2(tl.where(some, mass, 1.0))) * _LN_2, float("-inf"))


_INTEGERS = [
    "heads", "rows_a_stride", "k_a", "a_data_stride", "a_data_offset", "a_scale_stride",
    "a_scale_offset", "a_rotary_stride", "a_rotary_offset", "rows_b_stride", "k_b",
    "b_data_stride", "b_data_offset", "b_scale_stride", "b_scale_offset", "b_rotary_stride",
    "b_rotary_offset", "q_row", "q_head", "out_row", "out_head", "lse_row", "num_rows",
    "blocks_a", "blocks", "per_program",
]  # fmt: skip
_POINTERS = [
    "q", "rows_a", "a_data", "a_scales", "a_rotary", "rows_b", "b_data", "b_scales", "b_rotary",
    "sinks", "out", "lse", "pieces", "sums",
]  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS)
def sparse_mla_kernel(
    q, q_row, q_head, heads, num_rows, blocks_a, blocks, per_program,
    unit_a, unit_b, rope_unit_a, rope_unit_b, change, value_unit,
    rows_a, rows_a_stride, k_a, a_data, a_data_stride, a_data_offset, a_scales, a_scale_stride,
    a_scale_offset, a_rotary, a_rotary_stride, a_rotary_offset,
    rows_b, rows_b_stride, k_b, b_data, b_data_stride, b_data_offset, b_scales, b_scale_stride,
    b_scale_offset, b_rotary, b_rotary_stride, b_rotary_offset,
    sinks, out, out_row, out_head, lse, lse_row, pieces, sums,
    A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_ROTARY: tl.constexpr, A_TILE: tl.constexpr,
    A_COLUMNS: tl.constexpr, A_TOTAL: tl.constexpr, A_PLAIN: tl.constexpr, A_PAGE: tl.constexpr,
    A_DATA_UNIT: tl.constexpr, A_SCALE_UNIT: tl.constexpr, A_ROTARY_UNIT: tl.constexpr,
    A_DATA_ALIGN: tl.constexpr, A_SCALE_ALIGN: tl.constexpr, A_ROTARY_ALIGN: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, B_ROTARY: tl.constexpr, B_TILE: tl.constexpr,
    B_COLUMNS: tl.constexpr, B_TOTAL: tl.constexpr, B_PLAIN: tl.constexpr, B_PAGE: tl.constexpr,
    B_DATA_UNIT: tl.constexpr, B_SCALE_UNIT: tl.constexpr, B_ROTARY_UNIT: tl.constexpr,
    B_DATA_ALIGN: tl.constexpr, B_SCALE_ALIGN: tl.constexpr, B_ROTARY_ALIGN: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One range of blocks, for HEADS heads."""
    program = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = head < heads
    d = _element(WIDTH, HALVES)
    column = tl.arange(0, WIDTH)
    first = program * per_program
    last = tl.minimum(first + per_program, num_rows * blocks)
    q_row, out_row = q_row.to(tl.int64), out_row.to(tl.int64)
    rows_a_stride, rows_b_stride = rows_a_stride.to(tl.int64), rows_b_stride.to(tl.int64)
    place = program.to(tl.int64)
    sink = tl.full((HEADS,), float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
    for row in range(first // blocks, (last + blocks - 1) // blocks):
        begin = tl.maximum(first - row * blocks, 0)
        end = tl.minimum(last - row * blocks, blocks)
        q_at = tl.multiple_of(q + (row * q_row + head * q_head), 16)
        q_mask = exists[:, None]
        query = tl.load(q_at[:, None] + d[None, :], mask=q_mask, other=0.0)
        query_rope = query
        if ROPE > 0:
            r = WIDTH + _element(ROPE, HALVES)
            query_rope = tl.load(q_at[:, None] + r[None, :], mask=q_mask, other=0.0)
        acc = tl.zeros((HEADS, WIDTH), tl.float32)
        m = tl.full((HEADS,), float("-inf"), tl.float32)
        mass = tl.zeros((HEADS,), tl.float32)
        acc, m, mass = _attend(
            acc, m, mass, query, query_rope, unit_a, rope_unit_a,
            begin, tl.minimum(end, blocks_a),
            rows_a + row * rows_a_stride, k_a, a_data, a_data_stride, a_data_offset,
            a_scales, a_scale_stride, a_scale_offset, a_rotary, a_rotary_stride, a_rotary_offset,
            A_FORMAT, A_SCALE, A_ROTARY, A_TILE, A_COLUMNS, A_TOTAL, A_PLAIN, A_PAGE,
            A_DATA_UNIT, A_SCALE_UNIT, A_ROTARY_UNIT, A_DATA_ALIGN, A_SCALE_ALIGN,
            A_ROTARY_ALIGN, WIDTH, ROPE, BLOCK, HALVES, WIDEN,
        )  # fmt: skip
        if PARTS == 2:
            acc, m, mass = _attend(
                acc * change, m, mass, query, query_rope, unit_b, rope_unit_b,
                tl.maximum(begin - blocks_a, 0), end - blocks_a,
                rows_b + row * rows_b_stride, k_b, b_data, b_data_stride,
                b_data_offset, b_scales, b_scale_stride, b_scale_offset, b_rotary,
                b_rotary_stride, b_rotary_offset,
                B_FORMAT, B_SCALE, B_ROTARY, B_TILE, B_COLUMNS, B_TOTAL, B_PLAIN, B_PAGE,
                B_DATA_UNIT, B_SCALE_UNIT, B_ROTARY_UNIT, B_DATA_ALIGN, B_SCALE_ALIGN,
                B_ROTARY_ALIGN, WIDTH, ROPE, BLOCK, HALVES, WIDEN,
            )  # fmt: skip
        if (begin == 0) & (end == blocks):
            scale, total = _finish(acc, m, mass, sink)
            at = tl.multiple_of(out + (row * out_row + head * out_head), 16)
            values = acc * (scale * value_unit)[:, None]
            tl.store(at[:, None] + d[None, :], values.to(out.dtype.element_ty), mask=q_mask)
            tl.store(lse + (row * lse_row + head), total, mask=exists)
        else:
            piece = (place + row) * heads + head
            piece_at = tl.multiple_of(pieces + piece * WIDTH, 16)
            tl.store(piece_at[:, None] + column[None, :], acc, mask=q_mask)
            tl.store(sums + piece * 2, m, mask=exists)
            tl.store(sums + piece * 2 + 1, mass, mask=exists)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS)
def merge_kernel(
    sinks, out, out_row, out_head, lse, lse_row, pieces, sums, heads, blocks, per_program,
    value_unit, WIDTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Add the pieces of one head of a row up, in their order; rows without any have outputs."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = row.to(tl.int64)
    first, last = row * blocks // per_program, ((row + 1) * blocks - 1) // per_program
    if first == last:
        return
    column = tl.arange(0, WIDTH)
    m = tl.full((1,), float("-inf"), tl.float32)
    for program in range(first, last + 1):
        at = ((place + program) * heads + head) * 2 + tl.arange(0, 1)
        m = tl.maximum(m, tl.load(sums + at))
    base = tl.where(m == float("-inf"), 0.0, m)
    mass = tl.zeros((1,), tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    for program in range(first, last + 1):
        piece = (place + program) * heads + head
        at = piece * 2 + tl.arange(0, 1)
        fade = tl.exp2(tl.load(sums + at) - base)
        mass += tl.load(sums + at + 1) * fade
        acc += tl.load(pieces + piece * WIDTH + column) * fade
    sink = tl.full((1,), float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)
    scale, total = _finish(acc, m, mass, sink)
    at = out + (place * out_row + head * out_head) + _element(WIDTH, HALVES)
    tl.store(at, (acc * (scale * value_unit)).to(out.dtype.element_ty))
    tl.store(lse + (row * lse_row + head) + tl.arange(0, 1), total)
