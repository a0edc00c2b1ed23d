"""Small floats in Triton, bit for bit those of `sparse_kvcm.adapter.floats`.

Round to nearest, ties to even, and saturate. Inputs are float32 and finite. Conversions are integer
arithmetic, so that GPUs without these formats, and the interpreter, give the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float32_bits(values):
    """The bits of float32 values, int32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def to_float32(values):
    """BF16, FP16 or FP32 as float32. Triton's interpreter rounds BF16 that is not normal."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def to_bf16_bits(values):
    """Upper halves of float32, rounded, int16."""
    bits = float32_bits(values)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # wraps for no finite value
    return (rounded >> 16).to(tl.int16)


@triton.jit
def to_e4m3(values):
    """E4M3 codes, int32 in [0, 255]."""
    sign = (float32_bits(values) >> 24) & 0x80
    size = tl.minimum(tl.abs(values), 448.0)
    bits = float32_bits(size)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count 2^-9, which is what a float32 of 2^14 resolves.
    small = float32_bits(size + 16384.0) - 0x46800000
    return sign | tl.where(size < 0.015625, small, normal)


@triton.jit
def from_e4m3(codes):
    """Float32 values of E4M3 codes without a sign."""
    normal = ((codes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)


@triton.jit
def to_e2m1(values):
    """E2M1 codes, int32 in [0, 15]. The middle of two codes belongs to the even one."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((float32_bits(values) >> 28) & 8)


@triton.jit
def exponent_at_least(values):
    """The least e with 2^e >= value, for positive normal values, int32."""
    bits = float32_bits(values)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2^exponent, float32, for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
