"""The pointer rule: where attention on a layer begins to read.

Rows of selected units count in the arena where a layer has one (the *auxiliary* pool), else in the
pool that its storage maps it to (the *primary* pool). Under offload the latter is host history, or
nothing: rows of the arena would name other units there, so it is never a fall-back.

DeepSeek-V4 reads two caches: windows keep their own pool whatever becomes of the entries, for which
alone the rule holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparse_kvcm._core import InvalidArgument, PageIndexMode
from sparse_kvcm.attention.layouts import RecordLayout, dsa_layout, v4_layout
from sparse_kvcm.deepseek_v4.manager import DeepseekV4CacheManager
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.models import AttentionType

if TYPE_CHECKING:
    import torch

Entries = Literal["layer", "pool"]


@dataclass(frozen=True)
class AttentionBase:
    """Where one cache of one layer lies.

    Attributes
    ----------
    layout : RecordLayout
    buffers : tuple of torch.Tensor, uint8, shape (pages, page_bytes)
        One that has all regions, or one per region; see `RecordLayout.regions`.
    is_arena : bool
        Whether rows count in an arena, by slots of a `resolve`; else in a pool, by page indices.
    """

    layout: RecordLayout
    buffers: tuple[torch.Tensor, ...]
    is_arena: bool

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each region: what native kernels get as base pointers."""
        return tuple(one.pages.data_ptr() + one.offset for one in self.layout.regions(self.buffers))


def attention_base(
    manager: DsaManager | DeepseekV4CacheManager, layer: int, kind: AttentionType | None = None
) -> AttentionBase:
    """Where a layer's attention reads: the arena where there is one, else the mapped pool.

    Parameters
    ----------
    manager : DsaManager or DeepseekV4CacheManager
    layer : int
        Model layer.
    kind : AttentionType, optional
        DeepSeek-V4 alone: COMPRESS (the default) or SWA, the window, which has no arena.

    Raises
    ------
    InvalidArgument
        If the layer has no such cache.
    """
    if isinstance(manager, DsaManager):
        if kind is not None:
            raise InvalidArgument(f"[attention_base] kind must be None with DSA, got {kind.name}")
        config = manager.config
        if layer not in config.geometry.history_layers:
            raise InvalidArgument(
                f"[attention_base] layer must be one of {config.geometry.name}, in [0, "
                f"{config.geometry.num_layers}), got {layer}"
            )
        buffers = manager.latents.buffers(layer)
        layout = dsa_layout(config.geometry, config.kv_dtype, config.page_tokens)
        is_arena = config.offload is not None
        return AttentionBase(layout, tuple(pages for pages, _ in buffers), is_arena)
    kind = AttentionType.COMPRESS if kind is None else kind
    if kind not in (AttentionType.COMPRESS, AttentionType.SWA):
        raise InvalidArgument(
            f"[attention_base] kind must be COMPRESS or SWA, which attention reads, got {kind.name}"
        )
    access, geometry = manager.access, manager.config.geometry
    pages = [one for one, _ in access.buffers(layer, kind)]
    units = access.layout(layer, kind).page.tokens_per_block
    layout = v4_layout(geometry, access.kv_dtype(layer, kind), units)
    is_arena = kind is AttentionType.COMPRESS and layer in access.arenas
    return AttentionBase(layout, tuple(pages), is_arena)


@dataclass(frozen=True)
class PointerTable:
    """Base pointers of all layers, as native attention takes them.

    Attributes
    ----------
    primary : sequence of int
        Addresses of entries, 0 = none: an entry per layer, whose address has the layer's place in
        it, or one per pool.
    mapping : sequence of (entry, place)
        By layer. It begins `place` pages behind its entry; 0 where entries are layers, or where
        page indices have the place in them.
    page_bytes : int
        Of one layer's page in a primary pool.
    auxiliary : sequence of int
        Addresses by layer, 0 = none, in either case: an arena is one layer's.
    """

    primary: Sequence[int]
    mapping: Sequence[tuple[int, int]]
    page_bytes: int
    auxiliary: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.auxiliary) != len(self.mapping):
            raise InvalidArgument(
                f"[PointerTable] auxiliary must have {len(self.mapping)} layers like mapping, "
                f"got {len(self.auxiliary)}"
            )
        for layer, (entry, place) in enumerate(self.mapping):
            if not 0 <= entry < len(self.primary) or place < 0:
                raise InvalidArgument(
                    f"[PointerTable] mapping of layer {layer} must be an entry in [0, "
                    f"{len(self.primary)}) and a place >= 0, got {entry} and {place}"
                )

    def base(self, layer: int) -> int:
        """Address that rows of selected units count from: auxiliary, else primary."""
        self._check(layer)
        return self.auxiliary[layer] or self.window(layer)

    def window(self, layer: int) -> int:
        """Address of a layer's primary pool, whether or not it has an auxiliary one.

        Raises
        ------
        InvalidArgument
            If it has none on the GPU.
        """
        self._check(layer)
        entry, place = self.mapping[layer]
        if not self.primary[entry]:
            raise InvalidArgument(f"[PointerTable] layer {layer} must have a pool on the GPU")
        return self.primary[entry] + place * self.page_bytes

    def _check(self, layer: int) -> None:
        if not 0 <= layer < len(self.mapping):
            raise InvalidArgument(
                f"[PointerTable] layer must be in [0, {len(self.mapping)}), got {layer}"
            )


def pointer_table(
    manager: DsaManager | DeepseekV4CacheManager, entries: Entries = "layer", region: int = 0
) -> PointerTable:
    """The base pointers of a manager.

    DSA: a layer's latents are primary in a pool and auxiliary in an arena. DeepSeek-V4: windows
    are primary and entries, of either ratio and wherever they are, auxiliary.

    Parameters
    ----------
    manager : DsaManager or DeepseekV4CacheManager
    entries : {"layer", "pool"}
        What a primary address is of.
    region : int
        Of the records, such as 1 for the scales of NVFP4 in a buffer of their own.
    """
    if entries not in ("layer", "pool"):
        raise InvalidArgument(f"[pointer_table] entries must be layer or pool, got {entries!r}")
    layers = range(manager.config.geometry.num_layers)
    if isinstance(manager, DeepseekV4CacheManager):
        return _v4_table(manager, entries, region)
    addresses = [attention_base(manager, layer).addresses[region] for layer in layers]
    none = [0] * len(layers)
    by_layer = [(layer, 0) for layer in layers]
    if manager.config.offload is not None:
        return PointerTable(none, by_layer, 0, addresses)
    pool = manager.latents.pools[region]
    if entries == "layer":
        return PointerTable(addresses, by_layer, pool.page.page_bytes, none)
    ids = [pool.layers[layer] for layer in layers]
    storage, mode = pool.storage, PageIndexMode.PER_LAYER
    places = [storage.get_page_index_converter(i, pool.role, mode).position for i in ids]
    origin = storage.get_mem_pool_base_address(ids[0], pool.role, mode)
    return PointerTable([origin], [(0, one) for one in places], pool.page.page_bytes, none)


def _v4_table(manager: DeepseekV4CacheManager, entries: Entries, region: int) -> PointerTable:
    ratios = manager.config.geometry.compress_ratios
    windows = [attention_base(manager, i, AttentionType.SWA) for i in range(len(ratios))]
    # Page indices of windows have the layer's place, so that one address serves a pool.
    addresses = [one.addresses[0] for one in windows]
    primary = sorted(set(addresses)) if entries == "pool" else addresses
    mapping = [
        (primary.index(one) if entries == "pool" else layer, 0)
        for layer, one in enumerate(addresses)
    ]
    auxiliary = [
        attention_base(manager, i).addresses[region] if ratio else 0
        for i, ratio in enumerate(ratios)
    ]
    return PointerTable(primary, mapping, windows[0].layout.page.page_bytes, auxiliary)
