"""Page indices of a forward's requests, in its order, at a fixed address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparse_kvcm.adapter.slot_mapping import kernel_page_indices
from sparse_kvcm.step import PADDING

if TYPE_CHECKING:
    import torch


class ForwardTable:
    """Rows of a page table in the order of a forward, converted; only what changed is rewritten.

    Parameters
    ----------
    max_rows, max_pages : int
        Extents.
    scale : int
        Pages of the buffer's size per slot.
    device : str
        Where the table lies.

    Attributes
    ----------
    indices : torch.Tensor, int32, shape (max_rows, max_pages)
        Page indices of mode SHARED, -1 = none. The same memory throughout.
    """

    def __init__(self, max_rows: int, max_pages: int, scale: int, device: str) -> None:
        import torch

        self.indices = torch.full((max_rows, max_pages), -1, dtype=torch.int32, device=device)
        self._scale = scale
        self._shown: list[int | None] = [PADDING] * max_rows  # None: what there was has changed

    def refresh(self, base: torch.Tensor, rows: Sequence[int], changed: set[int]) -> list[int]:
        """Show these rows.

        Parameters
        ----------
        base : torch.Tensor, int32, shape (max_rows, max_pages)
            Slots by row, on any device.
        rows : sequence of int
            In the order of the forward; -1 is padding.
        changed : set of int
            Rows whose slots are others than at the last call.

        Returns
        -------
        list of int
            Places that were rewritten.
        """
        import torch

        # Also in places that this step does not use: they may show the row again later.
        self._shown = [None if row in changed else row for row in self._shown]
        places = [i for i, row in enumerate(rows) if row != self._shown[i]]
        for i in places:
            self._shown[i] = None
        if places:
            device = self.indices.device
            sources = torch.tensor([rows[i] for i in places], device=base.device)
            slots = base[sources.clamp(min=0)].masked_fill((sources < 0)[:, None], -1)
            self.indices[torch.tensor(places, device=device)] = kernel_page_indices(
                slots.to(device), self._scale
            )
        for i in places:
            self._shown[i] = rows[i]
        return places
