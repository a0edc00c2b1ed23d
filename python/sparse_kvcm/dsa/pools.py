"""The buffers of one role in a storage: where they lie, and views of them without a copy.

All layers of a role share one pool, so one conversion of page indices serves them: a slot of the
pool has a page of each layer, side by side, and a page index of mode SHARED is the slot's number
times the pages per slot, counted from an address that has the layer's place in it. That this is so
is checked once, against the storage's own converters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, PageIndexMode, Storage, StorageLayout
from sparse_kvcm.adapter.slot_mapping import (
    PageGeometry,
    SlotMapping,
    kernel_page_indices,
    map_tokens,
)

if TYPE_CHECKING:
    import torch


def representatives(layout: StorageLayout) -> dict[tuple[int, int, str], int]:
    """One storage layer per (pool group, pool, role): the least id that has the role there.

    The order of layer groups, and of layers in them, is no contract of a storage; this is the same
    whatever it is.
    """
    chosen: dict[tuple[int, int, str], int] = {}
    for buffer in layout.all_buffer_ids():
        place = layout.place(buffer.layer_id, buffer.role)
        key = (place.pool_group, place.pool, buffer.role)
        chosen[key] = min(buffer.layer_id, chosen.get(key, buffer.layer_id))
    return chosen


class RolePool:
    """All buffers of one role.

    Parameters
    ----------
    storage : Storage
        Kept alive.
    role : str
        Such as ``"INDEX_KEY"``.
    layers : mapping of int to int
        Storage layer of each model layer that has the role.
    page : PageGeometry
        Of its pages.

    Raises
    ------
    InvalidArgument
        If the storage does not keep these buffers in one pool, in the order of layers, side by
        side, in such pages.
    """

    def __init__(
        self, storage: Storage, role: str, layers: Mapping[int, int], page: PageGeometry
    ) -> None:
        self.storage = storage
        self.role = role
        self.layers = dict(sorted(layers.items()))
        self.page = page
        first = storage.layout.place(min(self.layers.values()), role)
        self.layer_group = first.layer_group
        self.pool_group = first.pool_group
        self.pool = first.pool
        self.scale = first.converter.scale
        for order, storage_layer in enumerate(self.layers.values()):
            self._check(order, storage_layer)
        wanted = min(self.layers.values())
        self.representative = representatives(storage.layout)[self.pool_group, self.pool, role]
        if self.representative != wanted:
            raise self._wrong("representative layer", wanted, self.representative)

    @property
    def bytes_per_token(self) -> int:
        """In all layers together."""
        return len(self.layers) * self.page.layout.unit_bytes

    @property
    def num_slots(self) -> int:
        """Pages of each layer."""
        return self.storage.pool_group_descs()[self.pool_group][self.pool].num_slots

    def view(self, layer: int) -> torch.Tensor:
        """Pages of a layer, uint8 ``[pages, page_bytes]``, by page index of mode SHARED.

        Pages overlap other layers' where indices are not multiples of `scale`.
        """
        import torch

        storage_layer = self.layers[layer]
        pages = self.storage.get_page_index_upper_bound(storage_layer, self.role)
        offset = self.storage.layout.place(storage_layer, self.role).offset_bytes
        return torch.as_strided(
            self._memory().view(-1),
            (pages, self.page.page_bytes),
            (self.page.page_bytes, 1),
            offset,
        )

    def map_appended(self, slots: torch.Tensor, history: int, count: int) -> SlotMapping:
        """Map `count` tokens behind `history` of a request, given its slots, int32 ``[pages]``."""
        import torch

        table = kernel_page_indices(slots[None], self.scale)
        positions = torch.arange(history, history + count, device=slots.device)
        return map_tokens(table, torch.zeros_like(positions), positions, self.page)

    def slots_view(self) -> torch.Tensor:
        """The whole pool, uint8 ``[slots, layers, 1, page_bytes]``."""
        import torch

        memory = self._memory()
        begin = self.storage.layout.place(self.representative, self.role).offset_bytes
        size = self.page.page_bytes
        return torch.as_strided(
            memory.view(-1),
            (memory.shape[0], len(self.layers), 1, size),
            (memory.shape[1], size, size, 1),
            begin,
        )

    def _memory(self) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(self.storage.pool_memory(self.pool_group, self.pool))

    def _check(self, order: int, storage_layer: int) -> None:
        place = self.storage.layout.place(storage_layer, self.role)
        if place.is_sparse:
            raise self._wrong(f"is_sparse of layer {storage_layer}", False, True)
        found = self.storage.get_page_index_converter(
            storage_layer, self.role, PageIndexMode.SHARED
        )
        first = self.storage.layout.place(min(self.layers.values()), self.role)
        facts = {
            "layer group": (first.layer_group, place.layer_group),
            "pool": ((first.pool_group, first.pool), (place.pool_group, place.pool)),
            "page_bytes": (self.page.page_bytes, place.page_bytes),
            "expansion": (1, found.expansion),
            "scale": (self.scale, found.scale),
            "offset": (first.offset_bytes + order * place.page_bytes, place.offset_bytes),
        }
        for name, (wanted, got) in facts.items():
            if wanted != got:
                raise self._wrong(f"{name} of layer {storage_layer}", wanted, got)

    def _wrong(self, what: str, wanted: object, got: object) -> InvalidArgument:
        return InvalidArgument(f"[RolePool] {self.role}: {what} must be {wanted}, got {got}")
