"""What the selection groups of a cache did and hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupStatistics:
    """Counts of one selection group over all committed steps, and its memory now.

    Attributes
    ----------
    group : int
        Index of the group.
    layers : tuple of int
        Its member layers, leader first.
    steps, rows : int
        Committed decode steps, and rows that they decoded, summed over the steps.
    hits, misses : int
        Selected units below the window that were in the lease already, and that were fetched.
    bytes_fetched : int
        Bytes copied from host history, all member layers.
    device_bytes : int
        Bytes of the leases held now, all member layers.
    history_bytes : int
        Bytes that the whole history of the requests takes now, all member layers.
    """

    group: int
    layers: tuple[int, ...]
    steps: int
    rows: int
    hits: int
    misses: int
    bytes_fetched: int
    device_bytes: int
    history_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits among the selected units below the window; 1.0 if there were none."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0
