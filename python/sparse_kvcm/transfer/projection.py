"""From tokens of a request to ranges of bytes: which addresses here go to which there.

A buffer of the source and the one of the same name of the target may have pages of different
sizes. Units are cut where either side's page, or turn of a ring, ends; what lies between two cuts
is dense on both sides, so it is a range per region. A page that is whole, and alike on both sides,
is one range with its padding. Then neighbours on both sides become one (`transport.merged`): pages
of all layers of a slot, and slots in a row, where both sides have them so.

Which pieces there are, and their order, follows from the two tables, the target's pages and the
tokens alone. So a receiver that knows a sender's table knows where each byte of a slice belongs
(`Projection.places`) without being told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparse_kvcm.transfer.page_table import (
    BufferEntry,
    LayerGroup,
    PageFormat,
    PageTable,
    PeerDataError,
    Pool,
)
from sparse_kvcm.transfer.transport import Parts, Ranges, Route, merged
from sparse_kvcm.transfer.wire import PageList

MAX_PIECES = 1 << 22  # of one slice, before merging: 100 MB here, whatever a peer asks for

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BufferPair:
    """Buffers of one name that lie in one pool each, and have one format each.

    Attributes
    ----------
    source_group, target_group : int
        Layer groups.
    source_pool, target_pool : Pool
    source_format, target_format : PageFormat
    source_offsets, target_offsets : tuple of int
        Within the slot, buffer by buffer.
    """

    source_group: int
    target_group: int
    source_pool: Pool
    target_pool: Pool
    source_format: PageFormat
    target_format: PageFormat
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]

    @property
    def route(self) -> Route:
        """Of their bytes."""
        source, target = self.source_pool, self.target_pool
        return Route(source.memory, target.memory, source.device, target.device)


class Projection:
    """How requests of one table lie in another. Made once for a peer.

    Raises
    ------
    PeerDataError
        If the source lacks a buffer of the target, or the two do not have the same units.
    """

    def __init__(self, source: PageTable, target: PageTable) -> None:
        self.source = source
        self.target = target
        self._pairs = _pairs(source, target)

    def ranges(
        self,
        source_pages: Mapping[int, PageList],
        target_pages: Iterable[PageList],
        tokens: tuple[int, int],
        prompt_tokens: int,
    ) -> dict[Route, Ranges]:
        """Ranges to write, as few as can be, by route: `pieces`, merged."""
        pieces = self.pieces(source_pages, target_pages, tokens, prompt_tokens)
        return {route: merged(one) for route, one in pieces.items()}

    def pieces(
        self,
        source_pages: Mapping[int, PageList],
        target_pages: Iterable[PageList],
        tokens: tuple[int, int],
        prompt_tokens: int,
    ) -> dict[Route, Parts]:
        """Ranges to write, by route, in the order of `places`.

        Parameters
        ----------
        source_pages : mapping of int to PageList
            By layer group of the source.
        target_pages : iterable of PageList
            Layer groups of the target that are to be filled.
        tokens : (int, int)
            From, to. Windows are trimmed to what a request of `prompt_tokens` tokens still reads.

        Raises
        ------
        PeerDataError
            If a page is missing, or a slot is not of its pool group.
        """
        found: dict[Route, list[Ranges]] = {}
        for pair, wanted, cuts in self._cuts(target_pages, tokens, prompt_tokens):
            own = source_pages.get(pair.source_group)
            if own is None:
                raise _wrong("source pages of layer group", pair.source_group, "be given")
            _check_slots("source", self.source, own)
            part = _stack(_sources(pair, cuts, own), *_targets(pair, cuts, wanted))
            found.setdefault(pair.route, []).append(part)
        return dict(found)

    def places(
        self, target_pages: Iterable[PageList], tokens: tuple[int, int], prompt_tokens: int
    ) -> dict[Route, Parts]:
        """Where the bytes of `pieces` belong, by route: uint64 (n, 2), target address and bytes.

        Raises
        ------
        PeerDataError
            As `pieces`.
        """
        found: dict[Route, list[Ranges]] = {}
        for pair, wanted, cuts in self._cuts(target_pages, tokens, prompt_tokens):
            part = _stack(*_targets(pair, cuts, wanted))
            found.setdefault(pair.route, []).append(part)
        return dict(found)

    def _cuts(
        self, target_pages: Iterable[PageList], tokens: tuple[int, int], prompt_tokens: int
    ) -> Iterator[tuple[BufferPair, PageList, Ints]]:
        """Pairs that have something to send, their pages on the target, and their cuts."""
        num_pieces = 0
        for pages in target_pages:
            _check_slots("target", self.target, pages)
            for pair in self._pairs[pages.layer_group]:
                cuts = self._cut(pair, tokens, prompt_tokens)
                if len(cuts) == 0:
                    continue
                num_pieces += len(cuts) * len(pair.source_offsets)
                if num_pieces * len(pair.source_format.regions) > MAX_PIECES:
                    raise _wrong("pieces of a slice", num_pieces, f"be at most {MAX_PIECES}")
                yield pair, pages, cuts

    def _cut(self, pair: BufferPair, tokens: tuple[int, int], prompt_tokens: int) -> Ints:
        """Runs of units [n, 2], begin and end, that are dense on both sides."""
        source, target = pair.source_format, pair.target_format
        begin = max(
            tokens[0],
            self._first("source", pair.source_group, prompt_tokens),
            self._first("target", pair.target_group, prompt_tokens),
        )
        per_unit = source.tokens_per_unit
        first, last, most = begin // per_unit, tokens[1] // per_unit, prompt_tokens // per_unit
        if first >= last:
            return np.zeros((0, 2), np.int64)
        cuts = np.unique(
            np.concatenate(
                (
                    [first, last],
                    np.arange(first - first % source.rows_per_page, last, source.rows_per_page),
                    np.arange(first - first % target.rows_per_page, last, target.rows_per_page),
                )
            )
        )
        cuts = cuts[cuts >= first].astype(np.int64)
        begins, ends = cuts[:-1], cuts[1:]
        for side in (source, target):  # of a ring, what the rest of its page does not overwrite
            page_end = np.minimum((begins // side.units_per_page + 1) * side.units_per_page, most)
            begins = np.maximum(begins, page_end - side.rows_per_page)
        keep = begins < ends
        return np.stack((begins[keep], ends[keep]), axis=1)

    def _first(self, side: str, group: int, prompt_tokens: int) -> int:
        table = self.source if side == "source" else self.target
        page = table.layer_groups[group].first_page(prompt_tokens, table.tokens_per_block)
        return page * table.tokens_per_block


def _pairs(source: PageTable, target: PageTable) -> list[list[BufferPair]]:
    """Pairs by layer group of the target."""
    known = {
        (view.kind, entry.role, entry.layers): (group, view.pool, entry)
        for group, view, entry in source.buffers()
    }
    joined: dict[tuple[int, int, int, int, int, int], list[tuple[BufferEntry, BufferEntry]]] = {}
    for target_group, view, wanted in target.buffers():
        name = (view.kind, wanted.role, wanted.layers)
        if name not in known:
            raise _wrong("a buffer of the target", name, "be in the source's table too")
        source_group, pool, own = known[name]
        _check_units(name, source.formats[own.format], target.formats[wanted.format])
        _check_windows(name, source.layer_groups[source_group], target.layer_groups[target_group])
        key = (source_group, target_group, pool, view.pool, own.format, wanted.format)
        joined.setdefault(key, []).append((own, wanted))
    pairs: list[list[BufferPair]] = [[] for _ in target.layer_groups]
    for key, entries in joined.items():
        source_group, target_group = key[:2]
        pairs[target_group].append(
            BufferPair(
                source_group,
                target_group,
                _pools(source, source_group)[key[2]],
                _pools(target, target_group)[key[3]],
                source.formats[key[4]],
                target.formats[key[5]],
                tuple(own.offset for own, _ in entries),
                tuple(wanted.offset for _, wanted in entries),
            )
        )
    return pairs


def _pools(table: PageTable, layer_group: int) -> Sequence[Pool]:
    return table.pool_groups[table.layer_groups[layer_group].pool_group].pools


def _check_units(name: object, source: PageFormat, target: PageFormat) -> None:
    facts = [
        (one.tokens_per_unit, [region.unit_bytes for region in one.regions], one.pieces)
        for one in (source, target)
    ]
    if facts[0] != facts[1]:
        raise _wrong(f"units of {name}", facts[1], f"be the source's, {facts[0]}")


def _check_windows(name: object, source: LayerGroup, target: LayerGroup) -> None:
    if source.window is not None and (target.window is None or target.window > source.window):
        raise _wrong(f"window of {name}", target.window, f"be within the source's {source.window}")


def _check_slots(side: str, table: PageTable, pages: PageList) -> None:
    if pages.layer_group >= len(table.layer_groups):
        limit = f"be below {len(table.layer_groups)}"
        raise _wrong(f"layer group of {side} pages", pages.layer_group, limit)
    num_slots = table.pool_groups[table.layer_groups[pages.layer_group].pool_group].num_slots
    slots = pages.slots
    if len(slots) and not -1 <= slots.min() <= slots.max() < num_slots:
        limit = f"be in [-1, {num_slots})"
        raise _wrong(f"slots of {side} pages", (slots.min(), slots.max()), limit)


def _sources(pair: BufferPair, cuts: Ints, own: PageList) -> Ints:
    """Addresses of a pair's pieces on the source, in their order: whole pages, then by region.

    Each cut by cut and then buffer by buffer, as buffers lie in a slot.
    """
    pages = _page_addresses(
        pair.source_pool, pair.source_format, pair.source_offsets, own, cuts[:, 0], "source"
    )
    return _piece_addresses(pages, pair.source_format, cuts, _are_whole(pair, cuts))


def _targets(pair: BufferPair, cuts: Ints, wanted: PageList) -> tuple[Ints, Ints]:
    """Addresses on the target, and bytes, of the same pieces."""
    pages = _page_addresses(
        pair.target_pool, pair.target_format, pair.target_offsets, wanted, cuts[:, 0], "target"
    )
    whole = _are_whole(pair, cuts)
    units = (cuts[:, 1] - cuts[:, 0])[~whole]
    sizes = [np.full(int(whole.sum()), pair.target_format.page_bytes)]
    sizes += [units * region.unit_bytes for region in pair.target_format.regions]
    places = _piece_addresses(pages, pair.target_format, cuts, whole)
    return places, np.repeat(np.concatenate(sizes), len(pair.target_offsets))


def _are_whole(pair: BufferPair, cuts: Ints) -> npt.NDArray[np.bool_]:
    """Which cuts are pages that are alike on both sides."""
    if pair.source_format != pair.target_format:
        return np.zeros(len(cuts), bool)
    whole: npt.NDArray[np.bool_] = cuts[:, 1] - cuts[:, 0] == pair.source_format.rows_per_page
    return whole


def _piece_addresses(
    pages: Ints, form: PageFormat, cuts: Ints, whole: npt.NDArray[np.bool_]
) -> Ints:
    rows = cuts[~whole, :1] % form.rows_per_page
    parts = [pages[whole]]
    parts += [pages[~whole] + region.offset + rows * region.unit_bytes for region in form.regions]
    return np.concatenate(parts).ravel()


def _page_addresses(
    pool: Pool, form: PageFormat, offsets: tuple[int, ...], pages: PageList, units: Ints, side: str
) -> Ints:
    """Where the pages of units begin, int64 [units, buffers]; a checked table has no overflow."""
    index = units // form.units_per_page - pages.first_page
    slots = pages.slots
    if index.min() < 0 or index.max() >= len(slots) or (slots[index] < 0).any():
        raise _wrong(
            f"{side} pages of layer group {pages.layer_group}",
            f"{len(slots)} from page {pages.first_page} on",
            f"hold units {units.min()} to {units.max()} in pages of {form.units_per_page}",
        )
    base = pool.base_address + slots[index].astype(np.int64) * pool.slot_bytes
    return base[:, None] + np.array(offsets, np.int64)[None, :]


def _stack(*columns: Ints) -> Ranges:
    out: Ranges = np.stack(columns, axis=1).astype(np.uint64)
    return out


def _wrong(what: str, got: object, rule: str) -> PeerDataError:
    return PeerDataError(f"[Projection] {what} must {rule}, got {got}")
