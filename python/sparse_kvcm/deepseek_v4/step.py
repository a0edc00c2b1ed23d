"""An open step of a DeepSeek-V4 manager: who takes part, and page tables in the forward's order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm.adapter.forward_table import ForwardTable
from sparse_kvcm.adapter.slot_mapping import spread
from sparse_kvcm.adapter.store import Store
from sparse_kvcm.deepseek_v4.pools import Scratch
from sparse_kvcm.step import PADDING, PreparedStep

if TYPE_CHECKING:
    import torch

At = slice | list[int] | range  # queries of a step


@dataclass(frozen=True)
class DeepseekV4Step:
    """An open step; b requests and rows of padding, n queries: new tokens, request by request.

    In a step that decodes n = b, padding included, and everything lies at fixed addresses.

    Attributes
    ----------
    prepared : PreparedStep
        Who takes part.
    rows : torch.Tensor, int32, shape (b,)
        Row of each; -1 is padding.
    lengths : torch.Tensor, int32, shape (b,)
        Tokens of each, new ones included; 0 is padding.
    query_places : torch.Tensor, int64, shape (n,)
        The place, in ``rows``, of each query's request.
    query_lengths : torch.Tensor, int32, shape (n,)
        Tokens up to each query, itself included; 0 is padding.
    tables : dict of int to torch.Tensor, int32, shape (b, max_pages)
        Slots of each layer group of the storage, -1 = none.
    scratch : dict of int to list of Scratch
        By layer group.
    """

    prepared: PreparedStep
    rows: torch.Tensor
    lengths: torch.Tensor
    query_places: torch.Tensor
    query_lengths: torch.Tensor
    tables: dict[int, torch.Tensor]
    scratch: dict[int, list[Scratch]]


class StepMemory:
    """Memory of a manager's steps.

    Parameters
    ----------
    layer_groups : iterable of int
        That have pages on the GPU.
    max_rows, max_pages : int
        Extents.
    device : str
    """

    def __init__(
        self, layer_groups: Iterable[int], max_rows: int, max_pages: int, device: str
    ) -> None:
        import torch

        self._tables = {
            group: ForwardTable(max_rows, max_pages, 1, device)
            for group in sorted(set(layer_groups))
        }
        self._rows = torch.full((max_rows,), PADDING, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._places = torch.arange(max_rows, device=device)

    def make(self, prepared: PreparedStep, store: Store) -> DeepseekV4Step:
        """Write the tensors of a step. Only rows whose tables changed are read."""
        import torch

        b = len(prepared.rows)
        lengths = [one.length for one in prepared.requests]
        lengths += [0] * (b - len(lengths))
        self._rows[:b] = torch.tensor(prepared.rows, dtype=torch.int32)
        self._lengths[:b] = torch.tensor(lengths, dtype=torch.int32)
        tables, scratch = {}, {}
        for group, table in self._tables.items():
            table.refresh(store.base_tables(group), prepared.rows, set(prepared.dirty))
            tables[group] = table.indices[:b]
            scratch[group] = _scratch(prepared, store, group)
        places, query_lengths = self._places[:b], self._lengths[:b]
        if any(one.new_tokens != 1 for one in prepared.requests):
            device = self._rows.device
            new = torch.tensor([one.new_tokens for one in prepared.requests], device=device)
            history = torch.tensor([one.history for one in prepared.requests], device=device)
            places, steps = spread(new)
            query_lengths = (history[places] + steps + 1).to(torch.int32)
        return DeepseekV4Step(
            prepared, self._rows[:b], self._lengths[:b], places, query_lengths, tables, scratch
        )


def _scratch(prepared: PreparedStep, store: Store, group: int) -> list[Scratch]:
    import torch

    found = []
    for place, one in enumerate(prepared.requests):
        pages, slots = store.scratch(one.request_id, group)
        if pages.end > pages.begin:
            found.append(Scratch(place, pages, torch.as_tensor(slots)))
    return found
