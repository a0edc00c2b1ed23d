"""DSA's records in NumPy, value by value: nearest of all codes, ties to the even one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
F32 = np.float32


def e4m3_value(code: int) -> float:
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1_value(code: int) -> float:
    sign = -1 if code & 8 else 1
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([e4m3_value(code) for code in range(127)])  # 127 is NaN
E2M1 = np.array([e2m1_value(code) for code in range(8)])


def nearest(value: float, table: npt.NDArray[np.float64], sign_bit: int) -> int:
    """The code of the nearest value; of two equally near ones the even code."""
    distance = np.abs(table - abs(float(value)))
    best = np.flatnonzero(distance == distance.min())
    code = int(best[0]) if len(best) == 1 or best[0] % 2 == 0 else int(best[1])
    return code | (sign_bit if math.copysign(1, value) < 0 else 0)


def e4m3(values: npt.ArrayLike) -> Bytes:
    array = np.asarray(values, F32)
    codes = [nearest(v, E4M3, 0x80) for v in array.ravel()]
    return np.array(codes, np.uint8).reshape(array.shape)


def e2m1(values: npt.ArrayLike) -> Bytes:
    array = np.asarray(values, F32)
    codes = np.array([nearest(v, E2M1, 8) for v in array.ravel()], np.uint8).reshape(-1, 2)
    return (codes[:, 0] + 16 * codes[:, 1]).reshape(*array.shape[:-1], -1)


def bf16(values: Floats) -> Bytes:
    """Upper halves of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(values, F32).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return upper.astype("<u2").view(np.uint8)


def power_at_least(value: float) -> int:
    """The least e >= -126 with 2**e >= value."""
    e = -126
    while 2.0**e < value:
        e += 1
    return e


def tiles(row: Floats, size: int) -> list[Floats]:
    return [row[i : i + size] for i in range(0, len(row), size)]


def scaled_e4m3(row: Floats, least_amax: float, power: bool) -> tuple[list[Bytes], list[Bytes]]:
    data, scales = [], []
    for tile in tiles(row, 128):
        scale = F32(max(F32(np.abs(tile).max()), F32(least_amax)) / F32(448))
        if power:
            scale = F32(2.0 ** power_at_least(float(scale)))
        data.append(e4m3(tile / scale))
        scales.append(np.array([scale], "<f4").view(np.uint8))
    return data, scales


def nvfp4(row: Floats, scale: float) -> tuple[Bytes, Bytes]:
    data, scales = [], []
    for block in tiles(row, 16):
        code = int(e4m3([F32(np.abs(block).max()) / F32(6 * scale)])[0])
        unit = F32(F32(E4M3[code]) * F32(scale))
        signed_zero = np.zeros(16, F32)
        data.append(e2m1(block / unit if unit else signed_zero))
        scales.append(code)
    return np.concatenate(data), np.array(scales, np.uint8)


def latent(row: Floats, kv_dtype: str, rank: int, scale: float) -> list[Bytes]:
    """The regions of one latent."""
    compressed, rope = row[:rank], row[rank:]
    if kv_dtype == "bf16":
        return [bf16(row)]
    if kv_dtype == "fp8":
        return [e4m3(row / F32(scale))]
    if kv_dtype == "fp8_ds_mla":
        data, scales = scaled_e4m3(compressed, 2.0**-126 * 448, power=False)
        return [np.concatenate([*data, *scales, bf16(rope)])]
    if kv_dtype == "nvfp4":
        return list(nvfp4(row, scale))
    data, scales = nvfp4(compressed, scale)
    place = [4 * (i % (len(scales) // 4)) + i // (len(scales) // 4) for i in range(len(scales))]
    return [np.concatenate([data, e4m3(rope), scales[place]])]


def index_key(row: Floats, index_dtype: str, index_scale: str = "fp32") -> list[Bytes]:
    """The regions of one index key."""
    if index_dtype == "bf16":
        return [bf16(row)]
    if index_dtype == "fp8":
        data, scales = scaled_e4m3(row, 1e-4, index_scale == "ue8m0")
        return [np.concatenate(data), np.concatenate(scales)]
    data, exponents = [], []
    for block in tiles(row, 32):
        e = power_at_least(float(F32(max(np.abs(block).max(), 2.0**-126)) / F32(6)))
        data.append(e2m1(block / F32(2.0**e)))
        exponents.append(e + 127)
    return [np.concatenate(data), np.array(exponents, np.uint8)]


def hard_rows(width: int, seed: int, n: int = 12) -> Floats:
    """Rows of many sizes: zeros, ties of both formats, tiny and large values, random ones."""
    rng: Any = np.random.default_rng(seed)
    rows = rng.standard_normal((n, width)) * 10.0 ** rng.integers(-6, 5, (n, 1))
    rows[0] = 0
    rows[1] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0.0], width)
    rows[2] = rng.choice([1.0625, 1.1875, 17, 19, 448, -448, 464, -0.0], width)
    rows[3] = rng.choice([1e-40, 2**-10, 3 * 2**-10, 448], width)
    rows[4, ::3] = 0
    rows[5] = 1e-9
    return rows.astype(F32)
