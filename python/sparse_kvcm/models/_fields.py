"""Reading fields of a model's configuration, with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_kvcm._core import InvalidArgument

FUNCTION = "ModelGeometry"
MOST_LAYERS = 4096
_MOST = 2**31 - 1


def read_int(
    config: Mapping[str, Any],
    field: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = _MOST,
) -> int:
    """Read an integer; a missing or null one is `default`, or refused without one."""
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(
            f"[{FUNCTION}] {field} must be an integer in [{least}, {most}], got {value!r}"
        )
    return value


def read_ints(config: Mapping[str, Any], field: str) -> list[int]:
    """Read a list of integers >= 0."""
    value = config.get(field)
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    ):
        raise InvalidArgument(
            f"[{FUNCTION}] {field} must be a list of integers >= 0, got {value!r}"
        )
    return value
