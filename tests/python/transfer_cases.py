"""Two sides of a transfer in memory of NumPy, and what must lie where, unit by unit.

Placement is written from the contract of `PageFormat`, one unit at a time: it shares no code with
the projection, which works on whole arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparse_kvcm.transfer.page_table import (
    BufferEntry,
    LayerGroup,
    PageFormat,
    PageRegion,
    PageTable,
    Pool,
    PoolGroup,
    PoolView,
    check_table,
)
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.wire import PageList

POISON = 0xEE


@dataclass(frozen=True)
class Kind:
    """Buffers of one layer group: what both sides agree on, and how one of them lays it out."""

    role: str
    layers: tuple[int, ...] = (0, 1, 2)
    unit_bytes: tuple[int, ...] = (24, 8)
    tokens_per_unit: int = 1
    window: int | None = None
    rows: int = 0  # of a ring
    memory: str = "VRAM"
    padding: int = 0  # behind each page
    gap: int = 0  # before the first buffer of a slot


HISTORY = Kind("KEY")
INDEX = Kind("INDEX_KEY", layers=(0, 2), unit_bytes=(16, 4))
SLIDING = Kind("SWA", layers=(0, 1), window=6)
STATE = Kind("STATE", layers=(1,), unit_bytes=(8,), window=4, rows=4)
COMPRESSED = Kind("COMPRESS", tokens_per_unit=4, unit_bytes=(12,))
ALL_KINDS = (HISTORY, INDEX, SLIDING, STATE, COMPRESSED)


@dataclass
class Side:
    """The memory of one side, and its table: one pool group of one pool for each kind."""

    kinds: Sequence[Kind]
    tokens_per_block: int
    num_slots: int = 16
    value: int = POISON
    pools: list[np.ndarray] = field(default_factory=list)
    table: PageTable = field(init=False)

    def __post_init__(self) -> None:
        groups, pool_groups, formats = [], [], []
        for index, kind in enumerate(self.kinds):
            form = page_format(kind, self.tokens_per_block)
            slot_bytes = kind.gap + len(kind.layers) * form.page_bytes
            memory = np.full((self.num_slots, slot_bytes), self.value, np.uint8)
            self.pools.append(memory)
            entries = tuple(
                BufferEntry((layer,), kind.role, kind.gap + i * form.page_bytes, index)
                for i, layer in enumerate(kind.layers)
            )
            groups.append(LayerGroup(index, kind.window, (PoolView(0, "replicated", entries),)))
            address = memory.ctypes.data
            pool_groups.append(PoolGroup((Pool(address, slot_bytes, self.num_slots, kind.memory),)))
            formats.append(form)
        self.table = PageTable(
            self.tokens_per_block, tuple(groups), tuple(pool_groups), tuple(formats)
        )
        check_table(self.table)

    def pages(self, tokens: int, slots: Sequence[int] | None = None) -> list[PageList]:
        """A page list per layer group, of what a request of `tokens` tokens still reads."""
        lists = []
        for index, kind in enumerate(self.kinds):
            total = -(-tokens // self.tokens_per_block)
            first = first_page(kind, tokens, self.tokens_per_block)
            chosen = list(slots or range(self.num_slots))[: total - first]
            lists.append(PageList.of(index, first, chosen))
        return lists

    def cell(self, group: int, layer: int, region: int, unit: int, pages: PageList) -> np.ndarray:
        """The bytes of a unit, a view of a pool."""
        kind, form = self.kinds[group], self.table.formats[group]
        page = unit // form.units_per_page
        slot = pages.slots[page - pages.first_page]
        row = (unit % form.units_per_page) % form.rows_per_page
        place = form.regions[region]
        begin = kind.gap + kind.layers.index(layer) * form.page_bytes
        begin += place.offset + row * place.unit_bytes
        return self.pools[group][slot, begin : begin + place.unit_bytes]

    def cells(self, lists: Iterable[PageList], tokens: int, live_tokens: tuple[int, int]):
        """Each unit of [from, to) tokens that a request of `tokens` reads: name and bytes."""
        for pages in lists:
            kind = self.kinds[pages.layer_group]
            for unit in live_units(kind, self.tokens_per_block, tokens, live_tokens):
                for layer in kind.layers:
                    for region in range(len(kind.unit_bytes)):
                        cell = self.cell(pages.layer_group, layer, region, unit, pages)
                        yield (kind.role, layer, region, unit), cell

    def write(self, name: str, lists: Iterable[PageList], tokens: int) -> None:
        """What a prefill leaves: every unit of the request that has a place."""
        for key, cell in self.cells(lists, tokens, (0, tokens)):
            cell[:] = content(name, key, len(cell))


def first_page(kind: Kind, tokens: int, tokens_per_block: int) -> int:
    """kvcm2: stale are the pages before floor((tokens + 1 - W) / tokens_per_block)."""
    return 0 if kind.window is None else max(0, (tokens + 1 - kind.window) // tokens_per_block)


def live_units(kind: Kind, tokens_per_block: int, tokens: int, span: tuple[int, int]) -> list[int]:
    """Units of pages that are not stale, whose last token is in the span; of a ring the newest."""
    per_page = tokens_per_block // kind.tokens_per_unit
    rows = kind.rows or per_page
    total = tokens // kind.tokens_per_unit
    live = []
    for unit in range(span[0] // kind.tokens_per_unit, span[1] // kind.tokens_per_unit):
        page = unit // per_page
        newest = min((page + 1) * per_page, total)
        if page >= first_page(kind, tokens, tokens_per_block) and unit >= newest - rows:
            live.append(unit)
    return live


def content(name: str, key: object, size: int) -> np.ndarray:
    """Bytes of a unit of a request, never all poison."""
    seed = zlib.crc32(repr((name, key)).encode())
    return ((seed >> (np.arange(size) % 24)) & 0x7F).astype(np.uint8)


def page_format(kind: Kind, tokens_per_block: int) -> PageFormat:
    units = tokens_per_block // kind.tokens_per_unit
    rows = kind.rows or units
    regions, end = [], 0
    for size in kind.unit_bytes:
        regions.append(PageRegion(end, size))
        end += size * rows
    return PageFormat(kind.tokens_per_unit, units, rows, end + kind.padding, tuple(regions))


def check_landed(
    name: str,
    source: Side,
    target: Side,
    lists: Sequence[PageList],
    tokens: int,
    span: tuple[int, int] | None = None,
) -> None:
    """Every unit that both sides have is there; nothing else of the target is changed."""
    expected = [np.full_like(pool, POISON) for pool in target.pools]
    shadow = Side(target.kinds, target.tokens_per_block, target.num_slots, pools=[])
    shadow.pools = expected
    for pages in lists:
        kind = target.kinds[pages.layer_group]
        both = [
            set(live_units(kind, side.tokens_per_block, tokens, span or (0, tokens)))
            for side in (source, target)
        ]
        for unit in both[0] & both[1]:
            for layer in kind.layers:
                for region, size in enumerate(kind.unit_bytes):
                    cell = shadow.cell(pages.layer_group, layer, region, unit, pages)
                    cell[:] = content(name, (kind.role, layer, region, unit), size)
    for kind, got, want in zip(target.kinds, target.pools, expected, strict=True):
        wrong = np.argwhere(got != want)
        assert len(wrong) == 0, f"{kind.role}: {len(wrong)} bytes, the first at {wrong[0]}"


def project(source: Side, target: Side, tokens: int, span: tuple[int, int] | None = None):
    """Ranges of a whole request, as a sender makes them."""
    return Projection(source.table, target.table).ranges(
        {one.layer_group: one for one in source.pages(tokens)},
        target.pages(tokens),
        span or (0, tokens),
        tokens,
    )
