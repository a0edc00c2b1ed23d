"""Reading and writing numbers of bytes."""

from __future__ import annotations

import re

from sparse_kvcm._core import InvalidArgument

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": int(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, field: str = "bytes") -> int:
    """Read a number of bytes: ``"45.6GB"`` (10^9), ``"64 GiB"`` (2^30), ``"123"``, or an int.

    Raises
    ------
    InvalidArgument
        Naming `field`, if it is none or negative.
    """
    match = _TEXT.fullmatch(str(text))
    factor = _UNITS.get(match[2].replace("k", "K")) if match else None
    if match is None or factor is None:
        raise InvalidArgument(
            f"[parse_bytes] {field} must be a number of bytes such as 45.6GB or 64GiB, "
            f"got {str(text)!r}"
        )
    if "." not in match[1]:
        return int(match[1]) * factor
    return int(float(match[1]) * factor)


def show_bytes(size: int) -> str:
    """Write a number of bytes for people: two decimals in GB, MB or kB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size} B"
