"""Elements to records in their slots: what `sparse_kvcm.attention.write` launches."""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_kvcm.attention.kernels import formats


@triton.jit
def _place(pages, slot, page_stride, offset, UNITS: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """Where a slot's piece of a region begins."""
    return pages + slot // UNITS * page_stride + offset + slot % UNITS * UNIT_BYTES


@triton.jit
def _load(elements, rotary, columns, mask, SPLIT: tl.constexpr, COUNT: tl.constexpr):
    """Elements of a unit as float32; those from SPLIT on are in `rotary`."""
    first = mask & (columns < SPLIT)
    values = formats.to_float32(tl.load(elements + columns, mask=first, other=0))
    if SPLIT < COUNT:
        rest = tl.load(rotary + columns - SPLIT, mask=mask & (columns >= SPLIT), other=0)
        values = tl.where(columns < SPLIT, values, formats.to_float32(rest))
    return values


@triton.jit
def _store_plain(place, values, columns, mask, FORMAT: tl.constexpr):
    """Elements that have no scale of their own, bf16 or e4m3."""
    if FORMAT == "bf16":
        words = place.to(tl.pointer_type(tl.int16))
        tl.store(words + columns, formats.to_bf16_bits(values), mask=mask)
    else:
        tl.store(place + columns, formats.to_e4m3(values).to(tl.uint8), mask=mask)


# A tensor's scale and what lies where differ from layer to layer and must not choose a kernel.
@triton.jit(do_not_specialize=["num_slots", "tensor_scale", "data_offset", "scale_offset"])
def write_units(
    elements,
    rotary,
    slots,
    data_pages,
    scale_pages,
    elements_stride,
    rotary_stride,
    slots_stride,
    num_slots,
    tensor_scale,
    amax_scale,
    least_amax,
    data_page_stride,
    data_offset,
    scale_page_stride,
    scale_offset,
    UNITS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    DATA_FORMAT: tl.constexpr,
    DATA_AT: tl.constexpr,
    COUNT: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROTARY_FORMAT: tl.constexpr,
    ROTARY_AT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """One unit. Elements that are stored alike, or in tiles of one scale; then rotary ones."""
    unit = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + unit * slots_stride).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        data = _place(data_pages, slot, data_page_stride, data_offset, UNITS, DATA_BYTES) + DATA_AT
        source = elements + unit * elements_stride
        rest = rotary + unit * rotary_stride
        if TILE == 0:
            columns = tl.arange(0, BLOCK)
            mask = columns < COUNT
            values = _load(source, rest, columns, mask, SPLIT, COUNT)
            if DATA_FORMAT == "e4m3":
                values = tl.div_rn(values, tl.full((BLOCK,), 1, tl.float32) * tensor_scale)
            _store_plain(data, values, columns, mask, DATA_FORMAT)
        else:
            scales = (
                _place(scale_pages, slot, scale_page_stride, scale_offset, UNITS, SCALE_BYTES)
                + SCALE_AT
            )
            _write_tiles(
                source, rest, data, scales, tensor_scale, amax_scale, least_amax,
                SPLIT, TILE, TILES, BLOCK, DATA_FORMAT, SCALE_FORMAT, SCALE_COLUMNS,
            )  # fmt: skip
        if ROPE > 0:
            place = _place(data_pages, slot, data_page_stride, data_offset, UNITS, DATA_BYTES)
            columns = tl.arange(0, ROPE_BLOCK)
            mask = columns < ROPE
            values = tl.load(rest + columns, mask=mask, other=0)
            _store_plain(
                place + ROTARY_AT, formats.to_float32(values), columns, mask, ROTARY_FORMAT
            )


@triton.jit
def _write_tiles(
    source,
    rotary,
    data,
    scales,
    tensor_scale,
    amax_scale,
    least_amax,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    DATA_FORMAT: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """BLOCK tiles, of which TILES exist. Pairs of elements, since E2M1 has two to a byte."""
    HALF: tl.constexpr = TILE // 2
    tile = tl.arange(0, BLOCK)
    pairs = tile[:, None] * HALF + tl.arange(0, HALF)[None, :]
    exists = tile < TILES
    mask = exists[:, None] & (pairs >= 0)
    even = _load(source, rotary, 2 * pairs, mask, SPLIT, TILE * TILES)
    odd = _load(source, rotary, 2 * pairs + 1, mask, SPLIT, TILE * TILES)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    ratio = tl.div_rn(tl.maximum(amax, least_amax), tl.full((BLOCK,), 1, tl.float32) * amax_scale)
    place = tile
    if SCALE_COLUMNS > 1:
        place = tile % SCALE_COLUMNS * (TILES // SCALE_COLUMNS) + tile // SCALE_COLUMNS
    if SCALE_FORMAT == "fp32":
        unit = ratio
        tl.store(scales.to(tl.pointer_type(tl.float32)) + place, unit, mask=exists)
    elif SCALE_FORMAT == "e8m0":
        exponent = formats.exponent_at_least(ratio)
        unit = formats.power_of_two(exponent)
        # Padding behind the scales is zero.
        codes = tl.where(exists, exponent + 127, 0)
        tl.store(scales + place, codes.to(tl.uint8), mask=tile < TILES + 1)
    else:
        codes = formats.to_e4m3(ratio)
        unit = formats.from_e4m3(codes) * tensor_scale
        tl.store(scales + place, codes.to(tl.uint8), mask=exists)
    divisor = tl.broadcast_to(tl.where(unit == 0, 1.0, unit)[:, None], (BLOCK, HALF))
    is_zero = (unit == 0)[:, None]
    even = tl.where(is_zero, 0.0, tl.div_rn(even, divisor))
    odd = tl.where(is_zero, 0.0, tl.div_rn(odd, divisor))
    if DATA_FORMAT == "e2m1":
        codes = formats.to_e2m1(even) | (formats.to_e2m1(odd) << 4)
        tl.store(data + pairs, codes.to(tl.uint8), mask=mask)
    else:
        tl.store(data + 2 * pairs, formats.to_e4m3(even).to(tl.uint8), mask=mask)
        tl.store(data + 2 * pairs + 1, formats.to_e4m3(odd).to(tl.uint8), mask=mask)
