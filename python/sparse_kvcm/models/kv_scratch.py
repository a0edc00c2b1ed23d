"""How large a scratch of selected units is: what planning counts and attention allocates."""

from __future__ import annotations

KV_TILE = 128  # rows that attention on NVFP4 reads at once


def scratch_rows(max_rows: int, top_k: int) -> int:
    """Rows of a scratch: the selections of all rows, to whole tiles, and one tile of zeros."""
    return -(-max_rows * top_k // KV_TILE) * KV_TILE + KV_TILE
