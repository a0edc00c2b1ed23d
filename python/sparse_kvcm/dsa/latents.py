"""Where a manager keeps latents: in pools on the GPU, or on the host with an arena of leases.

The part that managers differ in by what they offload, not by their version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, InvalidState, Storage
from sparse_kvcm.adapter.batch_store import BatchStore
from sparse_kvcm.adapter.scatter import Pages, Record, scatter
from sparse_kvcm.adapter.slot_mapping import PageGeometry, map_tokens
from sparse_kvcm.dsa.buffers import key_pools, typed_view
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.pools import RolePool
from sparse_kvcm.dsa.step_tensors import DsaStep
from sparse_kvcm.ops import ResolveOutputs

if TYPE_CHECKING:
    import torch


class LatentStore(ABC):
    """Latents of all layers.

    Attributes
    ----------
    pools : list of RolePool
        On the GPU, by page tables: one per region of a record. Empty with an arena.
    """

    pools: list[RolePool]

    @abstractmethod
    def select(self, step: DsaStep, group: int, selection: torch.Tensor) -> torch.Tensor:
        """Slots of a group's selection, as in `DsaManager.select`."""

    @abstractmethod
    def write_slots(self, step: DsaStep, group: int) -> torch.Tensor:
        """Slots of the step's new tokens, int ``[n]``; padding has -1, or one that nobody reads."""

    @abstractmethod
    def buffers(self, layer: int) -> list[Pages]:
        """Pages, and how tokens lie in them: one of all regions, or one per region."""

    @abstractmethod
    def view(self, layer: int, role: str) -> torch.Tensor:
        """As in `DsaManager.get_buffers`."""

    @abstractmethod
    def append(
        self, request_id: int, slots: torch.Tensor, history: int, records: Mapping[int, Record]
    ) -> None:
        """Write records of all layers behind `history` tokens of a request that imports.

        Parameters
        ----------
        request_id : int
        slots : torch.Tensor, int32, shape (pages,)
            Of its pages on the GPU.
        history : int
        records : mapping of int to Record
            By layer.
        """

    @abstractmethod
    def forget_step(self) -> None:
        """The step has ended; what it selected is no longer there."""


class ResidentLatents(LatentStore):
    """Latents in pools of a storage, found by page tables.

    Parameters
    ----------
    storage : Storage
    config : DsaCacheConfig
    """

    def __init__(self, storage: Storage, config: DsaCacheConfig) -> None:
        self._config = config
        self.pools = key_pools(storage, config)

    def select(self, step: DsaStep, group: int, selection: torch.Tensor) -> torch.Tensor:
        """See `LatentStore`. Nothing is fetched: a selection is looked up."""
        import torch

        b, k = selection.shape
        # Pages have room for more: a token is there once a step has written it.
        there = selection.masked_fill(selection >= step.lengths[:, None], -1)
        places = torch.arange(b, device=selection.device).repeat_interleave(k)
        page = self.pools[0].page
        mapping = map_tokens(step.page_tables["KEY"], places, there.reshape(-1), page)
        return _slots(mapping.data, page).view(b, k)

    def write_slots(self, step: DsaStep, group: int) -> torch.Tensor:
        """See `LatentStore`."""
        return _slots(step.slots["KEY"].data, self.pools[0].page)

    def buffers(self, layer: int) -> list[Pages]:
        """See `LatentStore`."""
        return [(pool.view(layer), pool.page) for pool in self.pools]

    def view(self, layer: int, role: str) -> torch.Tensor:
        """See `LatentStore`."""
        _check_role(self._config.key_roles, role)
        pool = self.pools[self._config.key_roles.index(role)]
        return typed_view(pool.view(layer), self._config, role)

    def append(
        self, request_id: int, slots: torch.Tensor, history: int, records: Mapping[int, Record]
    ) -> None:
        """See `LatentStore`."""
        n = len(next(iter(records.values()))[0])
        for number, pool in enumerate(self.pools):
            mapping = pool.map_appended(slots, history, n)
            for layer, record in records.items():
                scatter(pool.view(layer), mapping, (record[number].to(slots.device),))

    def forget_step(self) -> None:
        """See `LatentStore`. A selection is not kept."""


class OffloadedLatents(LatentStore):
    """Latents on the host; what is selected lies in leases of the manager's arena.

    Parameters
    ----------
    store : BatchStore
        Whose manager has the model's selection groups.
    config : DsaCacheConfig
    """

    def __init__(self, store: BatchStore, config: DsaCacheConfig) -> None:
        from torch.utils.dlpack import from_dlpack

        manager = store.manager
        self.pools = []
        self._config = config
        self._store = store
        self._arenas = {layer: from_dlpack(manager.arena(layer)) for layer in manager.layers}
        self._selected: dict[int, ResolveOutputs] = {}  # by selection group

    def select(self, step: DsaStep, group: int, selection: torch.Tensor) -> torch.Tensor:
        """See `LatentStore`. Resolves, and fetches what the arena lacks for all member layers."""
        from torch.utils.dlpack import from_dlpack

        out = self._selected[group] = self._store.select(group, step.rows, selection.contiguous())
        return from_dlpack(out.slots)

    def resolved(self, group: int) -> ResolveOutputs:
        """What `select` wrote for a group in this step."""
        if group not in self._selected:
            leader = self._config.geometry.groups[group][0]
            raise InvalidState(
                f"[DSACacheManagerV2] group {group} needs the selection of layer {leader} first; "
                "call select"
            )
        return self._selected[group]

    def write_slots(self, step: DsaStep, group: int) -> torch.Tensor:
        """See `LatentStore`. One column: a step adds one token."""
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(self.resolved(group).write_slots)[:, 0]

    def buffers(self, layer: int) -> list[Pages]:
        """See `LatentStore`."""
        return [(self._arenas[layer], self._config.latent_page)]

    def view(self, layer: int, role: str) -> torch.Tensor:
        """See `LatentStore`."""
        roles, page = self._config.key_roles, self._config.latent_page
        _check_role(roles, role)
        arena = self._arenas[layer]
        if len(roles) == 1:
            return typed_view(arena, self._config, role)
        begin, size = page.regions[roles.index(role)]
        region = arena[:, begin : begin + page.tokens_per_block * size]
        return region.view(len(arena), page.tokens_per_block, 1, size)

    def append(
        self, request_id: int, slots: torch.Tensor, history: int, records: Mapping[int, Record]
    ) -> None:
        """See `LatentStore`."""
        import torch

        units = {layer: torch.cat(record, 1).cpu().numpy() for layer, record in records.items()}
        self._store.import_units(request_id, units)

    def forget_step(self) -> None:
        """See `LatentStore`."""
        self._selected.clear()


def _check_role(roles: tuple[str, ...], role: str) -> None:
    if role not in roles:
        raise InvalidArgument(
            f"[get_buffers] role must be {' or '.join(roles)}, the buffers of latents, got {role}"
        )


def _slots(offsets: torch.Tensor, page: PageGeometry) -> torch.Tensor:
    """Slots of byte offsets in pages of one region; -1 stays -1."""
    return offsets.div(page.layout.unit_bytes, rounding_mode="floor")
