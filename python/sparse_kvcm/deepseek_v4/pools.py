"""The buffers of one attention type in a storage, for the layers of one compress ratio.

They share a pool, so one conversion of page indices serves them: a slot of the pool has `scale`
pages of their size, of which each layer has one. Kernels name it by `AttentionType.index_mode`:

    SHARED      slot * scale, counted from an address that has the layer's place in it
    PER_LAYER   slot * scale + place, counted from the pool's; pages of a prompt's step that no
                later step reads share scratch slots

That the storage keeps them so is checked once, against its own converters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, PageIndexMode, PageRange, Storage, UnitLayout
from sparse_kvcm.adapter.slot_mapping import PageGeometry, kernel_page_indices
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.models import AttentionType, DeepSeekV4Geometry
from sparse_kvcm.models.attention_types import BLOCK_SCALE_ROLE, state_rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scratch:
    """Pages of one request that a step writes and nobody reads later, and what they share."""

    place: int
    pages: PageRange
    slots: torch.Tensor


class TypePool:
    """All buffers of one attention type and compress ratio, of one region of its records.

    Parameters
    ----------
    storage : Storage
        Kept alive.
    kind : AttentionType
    role : str
        Of the buffers in the storage.
    layers : dict of int to int
        Storage layer of each model layer.
    page : PageGeometry
        Of its pages.

    Raises
    ------
    InvalidArgument
        If the storage does not keep these buffers in one pool, in such pages.
    """

    def __init__(
        self,
        storage: Storage,
        kind: AttentionType,
        role: str,
        layers: dict[int, int],
        page: PageGeometry,
    ) -> None:
        self.storage = storage
        self.kind = kind
        self.role = role
        self.page = page
        self.layers = layers
        first = storage.layout.place(next(iter(layers.values())), role)
        self.layer_group = first.layer_group
        self.pool_group = first.pool_group
        self.pool = first.pool
        self.scale = first.converter.scale
        self._origin = first.offset_bytes - first.converter.position * page.page_bytes
        self.positions = {layer: self._check(one) for layer, one in layers.items()}

    def table(
        self, layer: int, base: torch.Tensor, scratch: Sequence[Scratch] = ()
    ) -> torch.Tensor:
        """Page indices of a layer, int32 ``[b, pages]``, of the storage's slots."""
        import torch

        if self.kind.index_mode is PageIndexMode.SHARED:
            return kernel_page_indices(base, self.scale)
        table = kernel_page_indices(base, self.scale, self.positions[layer])
        for one in scratch:
            converter = self.storage.get_page_index_converter(
                self.layers[layer], self.role, PageIndexMode.PER_LAYER
            )
            row = converter.convert(
                base[one.place].cpu().numpy(), one.pages, one.slots.cpu().numpy()
            )
            table[one.place] = torch.as_tensor(row).to(table)
        return table

    def view(self, layer: int) -> torch.Tensor:
        """Pages by the indices of `table`, uint8 ``[pages, page_bytes]``, without a copy.

        In mode SHARED those at indices that are not multiples of `scale` are other layers'.
        """
        import torch
        from torch.utils.dlpack import from_dlpack

        memory = from_dlpack(self.storage.pool_memory(self.pool_group, self.pool))
        size = self.page.page_bytes
        place = self.positions[layer] if self.kind.index_mode is PageIndexMode.SHARED else 0
        shape = (memory.shape[0] * self.scale - place, size)
        return torch.as_strided(memory.view(-1), shape, (size, 1), self._origin + place * size)

    def scratch_slots(self, layer: int, num_pages: int) -> int:
        """Slots that so many scratch pages of one request take."""
        converter = self.storage.get_page_index_converter(
            self.layers[layer], self.role, PageIndexMode.PER_LAYER
        )
        return converter.scratch_slots(num_pages)

    def _check(self, storage_layer: int) -> int:
        place = self.storage.layout.place(storage_layer, self.role)
        found = self.storage.get_page_index_converter(
            storage_layer, self.role, self.kind.index_mode
        )
        offset = self._origin + place.converter.position * self.page.page_bytes
        facts = {
            "is_sparse": (False, place.is_sparse),
            "layer group": (self.layer_group, place.layer_group),
            "pool": ((self.pool_group, self.pool), (place.pool_group, place.pool)),
            "page_bytes": (self.page.page_bytes, place.page_bytes),
            "expansion": (1, found.expansion),
            "scale": (self.scale, found.scale),
            "offset": (offset, place.offset_bytes),
        }
        for name, (wanted, got) in facts.items():
            if wanted != got:
                raise InvalidArgument(
                    f"[TypePool] {self.role}: {name} of storage layer {storage_layer} must be "
                    f"{wanted}, got {got}"
                )
        return place.converter.position


def same_pages(pools: Sequence[TypePool]) -> None:
    """Check that regions which are buffers of their own have the same page indices.

    Raises
    ------
    InvalidArgument
        Naming the roles.
    """
    facts = [(pool.layer_group, pool.scale, pool.positions) for pool in pools]
    if any(fact != facts[0] for fact in facts):
        raise InvalidArgument(
            f"[TypePool] page indices of {' and '.join(pool.role for pool in pools)} must be "
            f"the same, got scales {[pool.scale for pool in pools]}: another buffer of the size of "
            "one is in its pool; take another kv_dtype or index_dtype"
        )


@dataclass(frozen=True)
class TypeLayout:
    """How the items of one attention type lie in pages.

    Attributes
    ----------
    page : PageGeometry
        Rows of a page.
    items_per_page : int
        Items of a page's tokens; a multiple of its rows, of which a ring has fewer.
    """

    page: PageGeometry
    items_per_page: int


def layout_of(config: DeepseekV4CacheConfig, kind: AttentionType, ratio: int) -> TypeLayout:
    """The layout of one attention type at one compress ratio."""
    geometry, tokens_per_block = config.geometry, config.tokens_per_block
    if kind.is_state:
        unit = UnitLayout([geometry.state_width(kind, ratio) * 4])
        return TypeLayout(PageGeometry(unit, state_rows(ratio)), tokens_per_block)
    if kind is AttentionType.SWA:
        items, unit = tokens_per_block, geometry.window_layout(config.kv_dtype)
    elif kind is AttentionType.INDEXER_COMPRESS:
        items, unit = tokens_per_block // ratio, geometry.index_layout(config.index_dtype)
    else:
        layout = geometry.unit_layout if ratio == 4 else geometry.window_layout
        items, unit = tokens_per_block // ratio, layout(config.kv_dtype)
    return TypeLayout(PageGeometry(unit, items), items)


def make_pools(
    storage: Storage,
    geometry: DeepSeekV4Geometry,
    kind: AttentionType,
    ratio: int,
    page: PageGeometry,
) -> list[TypePool]:
    """The pools of one type and ratio: one, or one per region where scales are of their own."""
    layers = {layer: geometry.storage_layer_of(kind, layer) for layer in geometry.layers_of(ratio)}
    first = next(iter(layers.values()))
    roles = {buffer.role for buffer in storage.layout.all_buffer_ids() if buffer.layer_id == first}
    if kind is not AttentionType.COMPRESS or BLOCK_SCALE_ROLE not in roles:
        return [TypePool(storage, kind, kind.role, layers, page)]
    pools = [
        TypePool(storage, kind, role, layers, one)
        for role, one in zip((kind.role, BLOCK_SCALE_ROLE), page.apart, strict=True)
    ]
    same_pages(pools)
    return pools
