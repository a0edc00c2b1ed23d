"""Layouts of stored units, their bytes by the NumPy codecs, and rows by their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import dsa_codec_oracle as oracle
import test_v4_records as v4_records
from sparse_kvcm.attention import RecordLayout, dsa_layout, v4_layout
from sparse_kvcm.models import DeepSeekV4Geometry, DsaGeometry, load_geometry

DSA = ("bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla")
V4 = ("bf16", "fp8", "fp8_ds_mla", "nvfp4")
LAYOUTS = [f"dsa/{one}" for one in DSA] + [f"v4/{one}" for one in V4]
POISON = 0xA5


def layout_of(name: str, units: int = 64) -> RecordLayout:
    """A layout at full widths."""
    model, _, kv_dtype = name.partition("/")
    dtype: Any = kv_dtype
    if model == "dsa":
        geometry = load_geometry("glm-5.2")
        assert isinstance(geometry, DsaGeometry)
        return dsa_layout(geometry, dtype, units)
    entries = load_geometry("deepseek-v4-flash")
    assert isinstance(entries, DeepSeekV4Geometry)
    return v4_layout(entries, dtype, units)


def record(layout: RecordLayout, row: np.ndarray, scale: float = 1.0) -> list[np.ndarray]:
    """The regions of one unit, by the NumPy codecs."""
    model, _, kv_dtype = layout.name.partition("/")
    if model == "v4" and kv_dtype == "fp8_ds_mla":
        data, footers = v4_records.footer_record(row[None])
        return [data[0], footers[0]]
    rank = layout.width - layout.rope if model == "dsa" else layout.width
    return oracle.latent(row, kv_dtype, rank, scale)


def put(layout: RecordLayout, pages: np.ndarray, slot: int, unit: list[np.ndarray]) -> None:
    """Write a unit's regions where section 3 of the design says they lie."""
    units = layout.units_per_page
    begin = 0
    for region in unit:
        at = begin + slot % units * len(region)
        pages[slot // units, at : at + len(region)] = region
        begin += units * len(region)


def poisoned(pages: int, page_bytes: int) -> np.ndarray:
    return np.full((pages, page_bytes), POISON, np.uint8)


def hard_rows(layout: RecordLayout, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that a dtype holds exactly, float32 values of many sizes among them."""
    rows = torch.from_numpy(oracle.hard_rows(layout.width, seed))
    if dtype == torch.float16:
        rows = rows.clamp(-60000, 60000)
    return rows.to(dtype)


def window_rows(
    table: np.ndarray, length: int, width: int, tokens: int, scale: int, position: int, pages: int
) -> list[int]:
    """The newest `width` tokens, oldest first."""
    rows = []
    for token in range(max(0, length - width), length):
        column = token // tokens
        slot = int(table[column]) if column < len(table) else -1
        page = slot * scale + position
        rows.append(page * tokens + token % tokens if slot >= 0 and page < pages else -1)
    return rows + [-1] * (width - len(rows))
