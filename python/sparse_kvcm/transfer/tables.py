"""What a cache manager has, as a page table: its buffers under names that both sides know.

A name is the model's: layer and role, whatever a manager calls its storage layers. So a resident
prefill and an offloading worker name the same buffers, though one has them all on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sparse_kvcm._core import Storage, UnitLayout
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.pools import layout_of
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.models import AttentionType
from sparse_kvcm.models.attention_types import BLOCK_SCALE_ROLE, types_of_ratio
from sparse_kvcm.transfer.page_table import (
    BufferEntry,
    LayerGroup,
    PageFormat,
    PageTable,
    Pool,
    PoolGroup,
    PoolView,
)

KEY, INDEX_KEY = "KEY", "INDEX_KEY"


@dataclass(frozen=True)
class Buffer:
    """One role of one layer.

    Attributes
    ----------
    layer : int
        Of the model.
    role : str
        Names it, with the layer.
    format : PageFormat
        Of its pages.
    storage_layer, storage_role : int, str
        What the storage calls it.
    group, member, region : int
        Of an offloaded buffer: its selection group, which of its layers it is, and the first region
        of the unit that it has. group is -1 for one that stays on the GPU.
    """

    layer: int
    role: str
    format: PageFormat
    storage_layer: int
    storage_role: str
    group: int = -1
    member: int = 0
    region: int = 0


def dsa_buffers(config: DsaCacheConfig) -> list[Buffer]:
    """All buffers of a DSA manager of version 2, layer by layer."""
    geometry, tokens = config.geometry, config.page_tokens
    pages = [config.latent_page] if len(config.key_roles) == 1 else config.latent_page.apart
    formats = [PageFormat.of(page.layout, tokens) for page in pages]
    offloads = config.offload is not None
    buffers = []
    for layer in geometry.history_layers:
        group = geometry.selection_group_of[layer] if offloads else -1
        member = geometry.groups[group].index(layer) if offloads else 0
        for region, (role, form) in enumerate(zip(config.key_roles, formats, strict=True)):
            buffers.append(Buffer(layer, role, form, layer, role, group, member, region))
    form = PageFormat.of(config.index_page.layout, tokens)
    for leader, *_ in geometry.groups:
        storage_layer = geometry.index_layer_of(leader)
        buffers.append(Buffer(leader, INDEX_KEY, form, storage_layer, INDEX_KEY))
    return buffers


def v4_buffers(config: DeepseekV4CacheConfig) -> list[Buffer]:
    """All buffers of a DeepSeek-V4 manager, layer by layer."""
    buffers = []
    for layer, ratio in enumerate(config.geometry.compress_ratios):
        for kind in types_of_ratio(ratio):
            buffers += _v4_buffers_of(config, layer, kind)
    return buffers


def _v4_buffers_of(config: DeepseekV4CacheConfig, layer: int, kind: AttentionType) -> list[Buffer]:
    geometry = config.geometry
    ratio = geometry.compress_ratios[layer]
    found = layout_of(config, kind, ratio)
    selected = kind is AttentionType.COMPRESS and ratio == 4
    group = geometry.selection_group_of[layer] if selected and config.offload else -1
    member = geometry.groups[group].index(layer) if group >= 0 else 0
    per_unit = config.tokens_per_block // found.items_per_page
    pages, roles = [found.page], [kind.role]
    if selected and config.kv_dtype == "nvfp4":  # scales are a buffer of their own
        pages = found.page.apart
        roles.append(BLOCK_SCALE_ROLE)
    storage_layer = geometry.storage_layer_of(kind, layer)
    return [
        Buffer(
            layer,
            role,
            PageFormat.of(page.layout, found.items_per_page, per_unit, found.page.tokens_per_block),
            storage_layer,
            role,
            group,
            member,
            region,
        )
        for region, (page, role) in enumerate(zip(pages, roles, strict=True))
    ]


def in_pages_of(buffer: Buffer, tokens: int) -> Buffer:
    """The same buffer in pages of so many tokens, a multiple of its units; not for rings."""
    form = buffer.format
    layout = UnitLayout([region.unit_bytes for region in form.regions])
    paged = PageFormat.of(layout, tokens // form.tokens_per_unit, form.tokens_per_unit)
    return replace(buffer, format=paged)


@dataclass(frozen=True)
class Tables:
    """A page table, and which of its layer groups are what.

    Attributes
    ----------
    table : PageTable
    group_of : dict of int to int
        Layer group of the table, by layer group of the storage.
    staging : int or None
        Layer group of the table whose pages are slots of staging.
    """

    table: PageTable
    group_of: dict[int, int]
    staging: int | None


def make_tables(
    storage: Storage,
    buffers: Iterable[Buffer],
    staging: tuple[Pool, Sequence[tuple[Buffer, int]]] | None = None,
) -> Tables:
    """Describe the pools of a storage, and staging with the buffers in its slots.

    Memory types are what the storage says of its own pools.

    Parameters
    ----------
    storage : Storage
        Kept alive by whoever registers the table's memory.
    buffers : iterable of Buffer
        Those with a group are left to `staging`.
    staging : (Pool, sequence of (Buffer, int)), optional
        Slots that offloaded buffers arrive in, and each one's offset.
    """
    layout, config = storage.layout, storage.config
    formats: dict[PageFormat, int] = {}
    entries: dict[int, dict[int, list[BufferEntry]]] = {}
    for one in buffers:
        if one.group >= 0:
            continue
        place = layout.place(one.storage_layer, one.storage_role)
        form = formats.setdefault(one.format, len(formats))
        entry = BufferEntry((one.layer,), one.role, place.offset_bytes, form)
        entries.setdefault(place.layer_group, {}).setdefault(place.pool, []).append(entry)
    pool_groups: list[PoolGroup] = []
    groups: list[LayerGroup] = []
    group_of: dict[int, int] = {}
    known: dict[int, int] = {}
    for index in sorted(entries):
        desc = layout.layer_groups[index]
        if desc.pool_group not in known:
            known[desc.pool_group] = len(pool_groups)
            pool_groups.append(_pools(storage, desc.pool_group))
        views = tuple(
            PoolView(pool, "replicated", tuple(sorted(found, key=lambda one: one.offset)))
            for pool, found in sorted(entries[index].items())
        )
        group_of[index] = len(groups)
        window = desc.life_cycle.sliding_window_size
        groups.append(LayerGroup(known[desc.pool_group], window, views))
    staging_group = None
    if staging is not None:
        pool, placed = staging
        found = tuple(
            BufferEntry(
                (one.layer,), one.role, offset, formats.setdefault(one.format, len(formats))
            )
            for one, offset in placed
        )
        staging_group = len(groups)
        paged = placed[0][0].format
        tokens = paged.tokens_per_unit * paged.units_per_page
        view = PoolView(0, "replicated", found)
        groups.append(LayerGroup(len(pool_groups), None, (view,), tokens))
        pool_groups.append(PoolGroup((pool,)))
    table = PageTable(config.tokens_per_block, tuple(groups), tuple(pool_groups), tuple(formats))
    return Tables(table, group_of, staging_group)


def _pools(storage: Storage, pool_group: int) -> PoolGroup:
    descs = storage.pool_group_descs()[pool_group]
    return PoolGroup(tuple(Pool.of(one, storage.config.device) for one in descs))
