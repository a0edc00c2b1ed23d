"""Small floats in torch: E4M3, E2M1 two to a byte, and scales that are powers of two.

All round to nearest, ties to even, and saturate. Inputs are float32 and finite.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_LEAST_EXPONENT = -126  # below it a float32 is not normal


def divide(values: torch.Tensor, by: float) -> torch.Tensor:
    """Divide float32 values, rounded once on every device.

    On a GPU torch multiplies by the reciprocal of a number, which may give another last bit.
    """
    import torch

    return values / torch.full((1,), by, dtype=torch.float32, device=values.device)


def to_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of each row, uint8 ``[n, bytes]``."""
    import torch

    width = values.shape[1] * values.element_size()
    return values.reshape(-1).view(torch.uint8).view(len(values), width)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Bytes of float32 values as E4M3, uint8 of the same shape."""
    import torch

    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of E4M3 bytes."""
    import torch

    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Pack float32 ``[n, d]`` as E2M1: uint8 ``[n, d / 2]``, even elements in the low halves.

    A tie goes to the even code, so the middle between codes i and i + 1 belongs to i if i is even.
    """
    import torch

    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        codes += size > middle if code % 2 == 0 else size >= middle
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def from_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Float32 values ``[n, 2 * bytes]`` of packed E2M1, without a table, which would be copied."""
    import torch

    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int32)
    exponent, last = codes >> 1 & 3, codes & 1
    halves = (last + 2 * exponent.clamp(max=1)) << (exponent - 1).clamp(min=0)
    return halves * (0.5 - (codes >> 3))


def exponent_at_least(values: torch.Tensor) -> torch.Tensor:
    """The least e with 2**e >= value, int32, for positive float32 values; at least -126."""
    import torch

    fraction, exponent = torch.frexp(values)  # fraction in [0.5, 1)
    return (exponent - (fraction == 0.5).to(torch.int32)).clamp(min=_LEAST_EXPONENT)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent, float32."""
    import torch

    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def to_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Bytes of exponents in [-127, 127], uint8."""
    import torch

    return (exponent + _E8M0_BIAS).to(torch.uint8)


def from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two, float32."""
    import torch

    return power_of_two(codes.to(torch.int32) - _E8M0_BIAS)
