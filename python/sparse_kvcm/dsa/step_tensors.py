"""The index tensors of a step, in the order in which the forward runs requests.

Page tables, rows and lengths lie at fixed addresses, so that a CUDA graph reads the step that is
open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.forward_table import ForwardTable
from sparse_kvcm.adapter.slot_mapping import SlotMapping, map_full_kv, map_new_tokens, map_tokens
from sparse_kvcm.dsa.pools import RolePool
from sparse_kvcm.step import PADDING, PreparedStep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DsaStep:
    """An open step; b requests and rows of padding, n new tokens.

    Attributes
    ----------
    prepared : PreparedStep
        Who takes part.
    rows : torch.Tensor, int32, shape (b,)
        Row of each; -1 is padding.
    lengths : torch.Tensor, int32, shape (b,)
        Tokens of each, new ones included; 0 is padding. What paged logits take beside a table.
    page_tables : dict of str to torch.Tensor, int32, shape (b, max_pages)
        Page indices of each role that has pages on the GPU, -1 = none.
    slots : dict of str to SlotMapping
        Places of new tokens of each such role, request by request. In a step that only decodes
        n = b, padding included, and the offsets lie at fixed addresses.
    """

    prepared: PreparedStep
    rows: torch.Tensor
    lengths: torch.Tensor
    page_tables: dict[str, torch.Tensor]
    slots: dict[str, SlotMapping]

    @property
    def num_new_tokens(self) -> int:
        """The n of its arrays: tokens that are written, padding included."""
        return len(self.slots["INDEX_KEY"].data)

    def full_kv(self, role: str = "INDEX_KEY") -> tuple[SlotMapping, torch.Tensor]:
        """Places of all tokens of the requests that compute a prompt, cached context included.

        Returns
        -------
        SlotMapping
            Of n tokens, request by request, in the order of the forward.
        torch.Tensor, int64, shape (requests + 1,)
            Where each of them begins.

        Raises
        ------
        InvalidArgument
            For a role without pages on the GPU.
        """
        import torch

        if role not in self.slots:
            raise InvalidArgument(
                f"[full_kv] role must be one with pages on the GPU, {' or '.join(self.slots)}, "
                f"got {role!r}"
            )
        which = [i for i, one in enumerate(self.prepared.requests) if one.is_context]
        chosen = torch.tensor(which, dtype=torch.int64, device=self.lengths.device)
        return map_full_kv(
            self.page_tables[role][chosen], self.lengths[chosen], self.slots[role].page
        )


class StepTensors:
    """Memory of a manager's steps.

    Parameters
    ----------
    pools : iterable of RolePool
        Roles with pages on the GPU.
    max_rows, max_pages : int
        Extents.
    device : str
    """

    def __init__(
        self, pools: Iterable[RolePool], max_rows: int, max_pages: int, device: str
    ) -> None:
        import torch

        self._pools = {pool.role: pool for pool in pools}
        self._tables = {
            role: ForwardTable(max_rows, max_pages, pool.scale, device)
            for role, pool in self._pools.items()
        }
        self._rows = torch.full((max_rows,), PADDING, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._offsets = {
            role: [
                torch.full((max_rows,), -1, dtype=torch.int64, device=device)
                for _ in pool.page.regions
            ]
            for role, pool in self._pools.items()
        }

    def make(self, prepared: PreparedStep, base: Callable[[int], torch.Tensor]) -> DsaStep:
        """Write the tensors of a step.

        Parameters
        ----------
        prepared : PreparedStep
        base : callable
            Slots by row of a layer group, int32 ``[max_rows, max_pages]``.
        """
        import torch

        b = len(prepared.rows)
        padding = [0] * (b - len(prepared.requests))
        lengths = [one.length for one in prepared.requests] + padding
        self._rows[:b] = torch.tensor(prepared.rows, dtype=torch.int32)
        self._lengths[:b] = torch.tensor(lengths, dtype=torch.int32)
        tables: dict[str, torch.Tensor] = {}
        slots: dict[str, SlotMapping] = {}
        for role, pool in self._pools.items():
            self._tables[role].refresh(base(pool.layer_group), prepared.rows, set(prepared.dirty))
            tables[role] = self._tables[role].indices[:b]
            slots[role] = self._map(pool, tables[role], prepared)
        return DsaStep(prepared, self._rows[:b], self._lengths[:b], tables, slots)

    def _map(self, pool: RolePool, table: torch.Tensor, prepared: PreparedStep) -> SlotMapping:
        import torch

        requests, device = prepared.requests, table.device
        if any(one.new_tokens != 1 for one in requests):
            history = torch.tensor([one.history for one in requests], device=device)
            new = torch.tensor([one.new_tokens for one in requests], device=device)
            return map_new_tokens(table[: len(requests)], history, new, pool.page)
        places = torch.arange(len(table), device=device)
        positions = self._lengths[: len(table)] - 1  # -1 in padding: no place
        mapping = map_tokens(table, places, positions, pool.page)
        fixed = [kept[: len(table)] for kept in self._offsets[pool.role]]
        for kept, offsets in zip(fixed, mapping.regions, strict=True):
            kept.copy_(offsets)
        return SlotMapping(pool.page, *fixed)
