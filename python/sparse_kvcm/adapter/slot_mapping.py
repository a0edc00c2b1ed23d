"""Where tokens lie: byte offsets of new tokens, and of all tokens of a request.

A page of a pool has its tokens' regions one after the other (`UnitLayout`), such as all data and
then all scales of index keys. The token at position p of a row lies in page
``table[row][p // page]`` at ``w = p % page``, and its region at

    page * page_bytes + region_offset + w * region_bytes

All offsets are int64: pools are larger than 2^31 bytes. They count from the view whose pages have
exactly `page_bytes` bytes; `scatter` reads and writes views with any page stride.
Everything here is a function of its arguments, vectorised, on the device of the page table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, UnitLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PageGeometry:
    """How tokens lie in the pages of one buffer.

    Attributes
    ----------
    layout : UnitLayout
        Regions of a token.
    tokens_per_block : int
        Tokens of a page.
    """

    layout: UnitLayout
    tokens_per_block: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layout.page_bytes(self.tokens_per_block)

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Where each region begins in a page, and its bytes per token."""
        return [
            (self.layout.region_offset(region, self.tokens_per_block), size)
            for region, size in enumerate(self.layout.region_bytes)
        ]

    @property
    def apart(self) -> list[PageGeometry]:
        """The pages of each region, where each is a buffer of its own."""
        return [
            PageGeometry(UnitLayout([size]), self.tokens_per_block)
            for size in self.layout.region_bytes
        ]


@dataclass(frozen=True)
class SlotMapping:
    """Byte offsets of tokens' data and scales, int64 ``[n]``; -1 where a token has no place.

    Attributes
    ----------
    page : PageGeometry
        Of the pages that offsets count in.
    data : torch.Tensor
        Of the first region.
    scale : torch.Tensor, optional
        Of the second, if there is one.
    """

    page: PageGeometry
    data: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """Offsets region by region."""
        return (self.data,) if self.scale is None else (self.data, self.scale)


def kernel_page_indices(base: torch.Tensor, scale: int, position: int = 0) -> torch.Tensor:
    """Page indices as kernels see them: slot * scale + position; -1 stays -1.

    Parameters
    ----------
    base : torch.Tensor, int32
        Slots of a page table.
    scale : int
        Pages of the buffer's size per slot, `Storage.get_page_index_scale`.
    position : int
        Mode PER_LAYER: the layer's place in a slot. Mode SHARED: 0.
    """
    return base.where(base < 0, base * scale + position)


def map_tokens(
    page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page: PageGeometry
) -> SlotMapping:
    """Map tokens of any rows.

    Parameters
    ----------
    page_table : torch.Tensor, int32, shape (rows, pages)
        Page indices as kernels see them, -1 = none.
    rows : torch.Tensor, int, shape (n,)
        Row of each token; -1 is padding.
    positions : torch.Tensor, int, shape (n,)
        Position of each token in its request. Where the table has no page there is no place.
    page : PageGeometry

    Returns
    -------
    SlotMapping
    """
    rows, positions = rows.long(), positions.long()
    column = positions.div(page.tokens_per_block, rounding_mode="floor")
    exists = (rows >= 0) & (positions >= 0) & (column < page_table.shape[1])
    if page_table.shape[0] == 0 or page_table.shape[1] == 0:
        exists, index = exists & False, positions
    else:
        index = page_table[rows.clamp(min=0), column.clamp(0, page_table.shape[1] - 1)].long()
    return _offsets(index, positions % page.tokens_per_block, exists & (index >= 0), page)


def map_slots(slots: torch.Tensor, page: PageGeometry) -> SlotMapping:
    """Map slots, counted over all pages, such as those of an arena: int ``[n]``, -1 = none."""
    slots = slots.long()
    index = slots.div(page.tokens_per_block, rounding_mode="floor")
    return _offsets(index, slots % page.tokens_per_block, slots >= 0, page)


def map_new_tokens(
    page_table: torch.Tensor,
    history: torch.Tensor,
    new_tokens: torch.Tensor,
    page: PageGeometry,
) -> SlotMapping:
    """Map the tokens that a step writes, request by request.

    Parameters
    ----------
    page_table : torch.Tensor, int32, shape (b, pages)
        In the order of the forward.
    history : torch.Tensor, int, shape (b,)
        Tokens that each request has before.
    new_tokens : torch.Tensor, int, shape (b,)
        Tokens that it adds; 0 in rows of padding.
    page : PageGeometry

    Returns
    -------
    SlotMapping
        Of ``sum(new_tokens)`` tokens.
    """
    rows, steps = spread(new_tokens)
    return map_tokens(page_table, rows, history.long()[rows] + steps, page)


def map_full_kv(
    page_table: torch.Tensor, lengths: torch.Tensor, page: PageGeometry
) -> tuple[SlotMapping, torch.Tensor]:
    """Map all tokens of requests, cached context and new ones: what a prefill's logits gather.

    Parameters
    ----------
    page_table : torch.Tensor, int32, shape (b, pages)
        In the order of the forward.
    lengths : torch.Tensor, int, shape (b,)
        Cached and new tokens of each request.
    page : PageGeometry

    Returns
    -------
    SlotMapping
        Of ``sum(lengths)`` tokens, request by request.
    torch.Tensor, int64, shape (b + 1,)
        Where each request begins in it.
    """
    import torch

    rows, positions = spread(lengths)
    starts = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))
    return map_tokens(page_table, rows, positions, page), starts


def spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number ``sum(counts)`` items: the row of each, and its place within the row; int64."""
    import torch

    counts = counts.long()
    if bool((counts < 0).any()):
        raise InvalidArgument(f"[spread] counts must be >= 0, got {int(counts.min())}")
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    begins = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows), device=counts.device) - begins[rows]


def _offsets(
    index: torch.Tensor, place: torch.Tensor, exists: torch.Tensor, page: PageGeometry
) -> SlotMapping:
    begin = index * page.page_bytes
    offsets = [
        (begin + offset + place * size).masked_fill(~exists, -1) for offset, size in page.regions
    ]
    return SlotMapping(page, *offsets)
