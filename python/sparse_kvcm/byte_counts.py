"""Reading and writing numbers of bytes."""

from __future__ import annotations

import re

from sparse_kvcm._core import InvalidArgument

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": int(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
MOST_DIGITS = 40
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, field: str = "bytes") -> int:
    """Read a number of bytes: ``"45.6GB"`` (10^9), ``"64 GiB"`` (2^30), ``"123"``, or an int.

    Raises
    ------
    InvalidArgument
        Naming `field`, if it is none or negative.
    """
    if isinstance(text, int) and text >= 0:
        return text
    match = _TEXT.fullmatch(str(text))
    factor = _UNITS.get(match[2].replace("k", "K")) if match else None
    if match is None or factor is None or len(match[1]) > MOST_DIGITS:
        raise InvalidArgument(
            f"[parse_bytes] {field} must be a number of bytes such as 45.6GB or 64GiB, of "
            f"{MOST_DIGITS} digits at most, got {shorten(str(text))}"
        )
    if "." not in match[1]:
        return int(match[1]) * factor
    return int(float(match[1]) * factor)


def shorten(text: str) -> str:
    """Quote a text for a message, its middle left out if it is long."""
    return repr(text if len(text) <= 80 else f"{text[:40]}...{text[-30:]}")


def show_bytes(size: int) -> str:
    """Write a number of bytes for people: two decimals in GB, MB or kB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size} B"
