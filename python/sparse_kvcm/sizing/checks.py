"""Checks of numbers that people give, which name the field, its bound and the value."""

from __future__ import annotations

import math

from sparse_kvcm._core import InvalidArgument

LEAST, MOST = 1e-9, 1e9


def check_int(function: str, field: str, value: object, low: int, high: int) -> None:
    """Refuse what is no integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(
            f"[{function}] {field} must be an integer in [{low}, {high}], got {value!r}"
        )


def check_positive(function: str, field: str, value: object) -> None:
    """Refuse what is no number > 0, infinity included, or makes other numbers infinite or 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise InvalidArgument(f"[{function}] {field} must be > 0 and finite, got {value!r}")
    if not LEAST <= value <= MOST:  # type: ignore[operator]
        raise InvalidArgument(
            f"[{function}] {field} must be in [{LEAST:g}, {MOST:g}], got {value!r}"
        )
