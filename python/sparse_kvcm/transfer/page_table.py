"""The page table: what a side of a transfer has, in words that the other side can check.

    layer groups   layers with one life cycle; a request has one list of page ids (slots) for each
      views        per pool and mapper kind: which buffers lie where in a slot
    pool groups    what slots consist of: a piece in each pool
      pools        [num_slots, slot_bytes] at a base address, in VRAM or DRAM
    formats        how units lie in a page of a buffer

A buffer is named by role and layers, the same on both sides; everything else may differ: page
sizes, places, pool groups, memory types. Two mapper kinds:

    replicated   a page of one layer, all of its bytes, the same on every rank: latents, index keys,
                 windows, compressor states; what pools on a GPU and staging hold
    unit_major   a page of host history: per unit a row with the pieces of all member layers

Pages of one kind never become the other by a transfer: that would be a range per row. Layer-major
pages reach a unit-major history by way of staging, from which the receiver repacks.

A table comes from a peer, so nothing in it is believed: `decode_table` refuses what does not hold
together, and `Pool` ranges are compared with registered memory before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from sparse_kvcm._core import CacheTier, InvalidArgument, PoolDesc, UnitLayout
from sparse_kvcm.transfer.transport import MemoryType, Region

SCHEMA_VERSION = 1
MAX_TABLE_BYTES = 8 << 20
MAX_DEVICES = 1024

MapperKind = Literal["replicated", "unit_major"]

_Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 48) - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48) - 1)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # no process has more
_Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_PageTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Role = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class PeerDataError(InvalidArgument):
    """What a peer sent is malformed, does not hold together, or reaches beyond its memory."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all of the schema has in common: immutable, and strict about its fields."""


class PageRegion(Struct, frozen=True):
    """One of the dense parts of a page: rows of `unit_bytes` from `offset` on, in bytes."""

    offset: _Offset
    unit_bytes: _Size


class PageFormat(Struct, frozen=True):
    """How the units of a page lie in a buffer.

    Unit u of a request is in page ``u // units_per_page``, at row ``u % units_per_page %
    rows_per_page`` of each region. Fewer rows than units make a ring: of a page's units it has the
    newest.

    Attributes
    ----------
    tokens_per_unit, units_per_page : int
        Their product is the tokens_per_block of the layer groups that have it.
    rows_per_page : int
        At most units_per_page, and a divisor of it.
    page_bytes : int
        Of the buffer, regions and padding; the buffer of the next layer may follow.
    regions : tuple of PageRegion
        Within the page, without overlap. Both sides have as many, with equal unit_bytes, in the
        same order.
    pieces : tuple of (int, int, int)
        unit_major: layer, region of the unit and bytes of each piece of a row, in their order. Both
        sides have the same. Else empty.
    """

    tokens_per_unit: _Count
    units_per_page: _Count
    rows_per_page: _Count
    page_bytes: _Size
    regions: Annotated[tuple[PageRegion, ...], msgspec.Meta(min_length=1, max_length=16)]
    pieces: Annotated[tuple[tuple[_Index, _Index, _Size], ...], msgspec.Meta(max_length=4096)] = ()

    @classmethod
    def of(
        cls, layout: UnitLayout, units_per_page: int, tokens_per_unit: int = 1, rows: int = 0
    ) -> PageFormat:
        """The format of arena and pool pages of a `UnitLayout`; `rows` of a ring, if it is one."""
        rows = rows or units_per_page
        regions = tuple(
            PageRegion(layout.region_offset(i, rows), size)
            for i, size in enumerate(layout.region_bytes)
        )
        return cls(tokens_per_unit, units_per_page, rows, layout.page_bytes(rows), regions)


class BufferEntry(Struct, frozen=True):
    """One buffer of a view.

    Attributes
    ----------
    layers : tuple of int
        Global layer ids: one (replicated), or the member layers of a selection group, leader first.
    role : str
        Such as "KEY". With kind and layers it names the buffer on both sides.
    offset : int
        Of its page within the slot, in bytes.
    format : int
        Index into the table's formats.
    """

    layers: Annotated[tuple[_Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    role: _Role
    offset: _Offset
    format: _Index


class PoolView(Struct, frozen=True):
    """The buffers of a layer group in one pool that are mapped in one way, by ascending offset.

    A layer group has one view per (pool, kind).
    """

    pool: _Index
    kind: MapperKind
    entries: Annotated[tuple[BufferEntry, ...], msgspec.Meta(min_length=1, max_length=65536)]


class LayerGroup(Struct, frozen=True):
    """Layers with one life cycle.

    Attributes
    ----------
    pool_group : int
        Whose slots its page ids are.
    window : int or None
        Tokens that are read, the newest; None = all.
    views : tuple of PoolView
        By ascending (pool, kind).
    tokens_per_block : int or None
        Of its pages; None = the table's, as it must be with a window. Staging may have others.
    """

    pool_group: _Index
    window: _Count | None
    views: Annotated[tuple[PoolView, ...], msgspec.Meta(min_length=1, max_length=1024)]
    tokens_per_block: _PageTokens | None = None

    def first_page(self, tokens: int, tokens_per_block: int) -> int:
        """The first page that a request of `tokens` tokens still reads: those before are stale."""
        if self.window is None:
            return 0
        return max(0, (tokens + 1 - self.window) // tokens_per_block)


class Pool(Struct, frozen=True):
    """Slots at [base_address + i * slot_bytes]."""

    base_address: _Address
    slot_bytes: _Size
    num_slots: _Count
    memory: MemoryType
    device: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DEVICES)] = 0

    @classmethod
    def of(cls, desc: PoolDesc, device: str) -> Pool:
        """The pool of a storage on a device, "cpu" or "cuda:<index>".

        Its memory type is what the storage says of its medium. Without a GPU all of it is DRAM.
        """
        kind, _, index = device.partition(":")
        on_gpu = desc.storage_medium is CacheTier.GPU_MEM and kind == "cuda"
        memory: MemoryType = "VRAM" if on_gpu else "DRAM"
        number = int(index or 0) if on_gpu else 0
        return cls(desc.base_address, desc.slot_bytes, desc.num_slots, memory, number)

    @property
    def region(self) -> Region:
        """All of it, for `Transport.register`."""
        return Region(self.base_address, self.slot_bytes * self.num_slots, self.memory, self.device)


class PoolGroup(Struct, frozen=True):
    """Pools whose slots belong together: slot i is piece i of each."""

    pools: Annotated[tuple[Pool, ...], msgspec.Meta(min_length=1, max_length=1024)]

    @property
    def num_slots(self) -> int:
        """Slots that all of its pools have."""
        return min(pool.num_slots for pool in self.pools)


class PageTable(Struct, frozen=True):
    """All that a side has to send from, or to receive into."""

    tokens_per_block: _PageTokens
    layer_groups: Annotated[tuple[LayerGroup, ...], msgspec.Meta(min_length=1, max_length=1024)]
    pool_groups: Annotated[tuple[PoolGroup, ...], msgspec.Meta(min_length=1, max_length=1024)]
    formats: Annotated[tuple[PageFormat, ...], msgspec.Meta(min_length=1, max_length=1024)]
    version: int = SCHEMA_VERSION

    def regions(self) -> list[Region]:
        """Memory of all pools, for `Transport.register`."""
        return [pool.region for group in self.pool_groups for pool in group.pools]

    def buffers(self) -> Iterator[tuple[int, PoolView, BufferEntry]]:
        """Layer group, view and entry of every buffer."""
        for index, group in enumerate(self.layer_groups):
            for view in group.views:
                for entry in view.entries:
                    yield index, view, entry


class AnyVersion(msgspec.Struct, frozen=True):
    """What can be read of a table, or a card, of any version."""

    version: int


def encode_table(table: PageTable) -> bytes:
    """Write a table, checked, as msgpack.

    Raises
    ------
    PeerDataError
        If it would be refused by `decode_table`.
    """
    data = msgspec.msgpack.encode(table)
    decode_table(data)
    return data


def decode_table(data: bytes) -> PageTable:
    """Read a peer's table, and believe nothing.

    Raises
    ------
    PeerDataError
        If it is too long, of another version, malformed, or does not hold together.
    """
    if len(data) > MAX_TABLE_BYTES:
        raise PeerDataError(
            f"[decode_table] data must have at most {MAX_TABLE_BYTES} bytes, got {len(data)}"
        )
    try:
        version = msgspec.msgpack.decode(data, type=AnyVersion).version
        if version != SCHEMA_VERSION:
            raise PeerDataError(
                f"[decode_table] version must be {SCHEMA_VERSION}, got {version}; both sides need "
                "the same sparse_kvcm schema"
            )
        table = msgspec.msgpack.decode(data, type=PageTable)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerDataError(f"[decode_table] malformed table: {error}") from error
    check_table(table)
    return table


def check_table(table: PageTable) -> None:
    """Refuse a table that does not hold together.

    Types, counts and single values are the schema's; this is about what they say of each other.

    Raises
    ------
    PeerDataError
        Naming the field.
    """
    for i, one in enumerate(table.formats):
        _check_format(f"formats[{i}]", one)
    for i, group in enumerate(table.pool_groups):
        for j, pool in enumerate(group.pools):
            end = pool.base_address + pool.slot_bytes * pool.num_slots
            if pool.base_address == 0 or end > 1 << 63:
                raise _wrong(f"pool_groups[{i}].pools[{j}]", "end below 2**63 and not be null", end)
            if pool.memory == "DRAM" and pool.device:
                raise _wrong(f"pool_groups[{i}].pools[{j}].device", "be 0 for DRAM", pool.device)
    for i, layer_group in enumerate(table.layer_groups):
        if layer_group.pool_group >= len(table.pool_groups):
            raise _wrong(
                f"layer_groups[{i}].pool_group",
                f"be in [0, {len(table.pool_groups)})",
                layer_group.pool_group,
            )
        _check_views(table, i, layer_group)
    names = set()
    for _, view, entry in table.buffers():
        name = (view.kind, entry.role, entry.layers)
        if name in names:
            raise _wrong("layer_groups", "name each buffer once", name)
        names.add(name)


def _check_format(name: str, one: PageFormat) -> None:
    if one.units_per_page % one.rows_per_page:
        raise _wrong(f"{name}.rows_per_page", "divide units_per_page", one.rows_per_page)
    end = 0
    for region in sorted(one.regions, key=lambda region: region.offset):
        if region.offset < end:
            raise _wrong(f"{name}.regions", "not overlap", region.offset)
        end = region.offset + region.unit_bytes * one.rows_per_page
    if end > one.page_bytes:
        raise _wrong(f"{name}.regions", f"lie within page_bytes {one.page_bytes}", end)
    if sum(size for _, _, size in one.pieces) > one.regions[0].unit_bytes:
        raise _wrong(f"{name}.pieces", "fit into a row", len(one.pieces))


def _check_views(table: PageTable, index: int, group: LayerGroup) -> None:
    pools = table.pool_groups[group.pool_group].pools
    tokens = group.tokens_per_block or table.tokens_per_block
    if group.window is not None and tokens != table.tokens_per_block:
        rule = f"be the table's {table.tokens_per_block} with a window"
        raise _wrong(f"layer_groups[{index}].tokens_per_block", rule, tokens)
    keys = [(view.pool, view.kind) for view in group.views]
    if keys != sorted(set(keys)):
        raise _wrong(f"layer_groups[{index}].views", "be one per (pool, kind), ascending", keys)
    for view in group.views:
        name = f"layer_groups[{index}].views of pool {view.pool}"
        if view.pool >= len(pools):
            raise _wrong(name, f"have a pool in [0, {len(pools)})", view.pool)
        end = 0
        for entry in view.entries:
            if entry.format >= len(table.formats):
                raise _wrong(f"{name}: format", f"be below {len(table.formats)}", entry.format)
            one = table.formats[entry.format]
            if one.tokens_per_unit * one.units_per_page != tokens:
                raise _wrong(
                    f"{name}: units_per_page * tokens_per_unit",
                    f"be tokens_per_block {tokens}",
                    one.units_per_page * one.tokens_per_unit,
                )
            if (view.kind == "unit_major") != bool(one.pieces):
                raise _wrong(f"{name}: pieces", "be there for unit_major alone", view.kind)
            if view.kind == "replicated" and len(entry.layers) != 1:
                raise _wrong(f"{name}: layers", "be one", entry.layers)
            if entry.offset < end:
                raise _wrong(f"{name}: offset", f"ascend without overlap from {end}", entry.offset)
            end = entry.offset + one.page_bytes
        if end > pools[view.pool].slot_bytes:
            raise _wrong(f"{name}: entries", f"fit {pools[view.pool].slot_bytes} bytes", end)


def _wrong(what: str, rule: str, got: object) -> PeerDataError:
    return PeerDataError(f"[check_table] {what} must {rule}, got {got}")
