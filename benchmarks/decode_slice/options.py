"""Checks of what a command is given, before anything is measured; all raise ValueError."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from sparse_kvcm._core import MAX_CACHED_SLOTS

from benchmarks.decode_slice.model import SliceModel


def check_least(name: str, value: int, least: int) -> None:
    """An option of at least `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_batches(text: str) -> None:
    """``max`` and counts of requests."""
    for one in text.split(","):
        if one != "max" and not (one.isdecimal() and int(one) > 0):
            raise ValueError(f'--batches must be of "max" and integers from 1 on, got {one!r}')


def check_factor(model: SliceModel, factor: float) -> None:
    """From a selection to the largest lease."""
    most = (MAX_CACHED_SLOTS // model.units_per_page - 1) * model.units_per_page
    if not 1 <= factor <= most / model.geometry.top_k:  # NaN, too
        most_factor = f"{most / model.geometry.top_k:g}"
        raise ValueError(f"--factor must be in [1, {most_factor}] for {model.name}, got {factor}")


def check_ranks(model: SliceModel, ranks: int) -> None:
    """Ranks with equal shares of the experts, each enough for a token."""
    most = model.experts // model.experts_per_token
    if not 1 <= ranks <= most or model.experts % ranks:
        what = f"a divisor of {model.experts}, the experts, up to {most}"
        raise ValueError(f"--ranks must be {what}, got {ranks}")


def check_device(name: str) -> None:
    """A CPU, or a GPU by number."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be cpu, cuda or such as cuda:0, got {name!r}")


def check_plot(folder: Path) -> None:
    """A folder, there or not, and what draws."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which cannot be imported")
    check_place("--plot", folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--plot must be a folder, got {str(folder)!r}")


def check_place(name: str, path: Path) -> None:
    """A path that can be made or written."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise ValueError(f"{name} must be a path that can be written, got {str(path)!r}")
