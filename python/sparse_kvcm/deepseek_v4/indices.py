"""Index conversions of DeepSeek-V4: pure functions on tensors, on the device of their arguments.

Three counts of one history: *tokens*, *entries* of ratio 4 (the units of selections) and entries of
ratio 128. An entry exists once its last token is there. A page of `tokens_per_block` tokens holds
all of these of the same tokens, so one column of a page table serves each of them:

    token p of a window         column p // tokens_per_block, row p % tokens_per_block
    entry e of a ratio          column e // (tokens_per_block / ratio), row e % that
    input p of a compressor     column p // tokens_per_block, row p % state_rows(ratio): a ring
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.slot_mapping import PageGeometry, SlotMapping, map_tokens

if TYPE_CHECKING:
    import torch


def num_entries(tokens: torch.Tensor, ratio: int) -> torch.Tensor:
    """Entries that so many tokens have made, whole ones alone."""
    return tokens.div(ratio, rounding_mode="floor")


def completes_entry(lengths: torch.Tensor, ratio: int) -> torch.Tensor:
    """Whether the newest token of each row is the last one of an entry; false in padding."""
    return (lengths > 0) & (lengths % ratio == 0)


def completed_entries(lengths: torch.Tensor, ratio: int) -> torch.Tensor:
    """The entry that the newest token of each row completes, -1 where it completes none."""
    return (num_entries(lengths, ratio) - 1).masked_fill(~completes_entry(lengths, ratio), -1)


def global_indices(
    page_table: torch.Tensor, local: torch.Tensor, rows_per_page: int, first: int = 0
) -> torch.Tensor:
    """Turn rows within a request into rows of a pool.

    Parameters
    ----------
    page_table : torch.Tensor, int32, shape (b, pages)
        Page indices, -1 = none.
    local : torch.Tensor, int, shape (b, k)
        Such as ordinals of entries; -1 = none.
    rows_per_page : int
    first : int
        Rows in front of page 0: (address of the buffer - address of the pool) / bytes of a row,
        where bytes of a row are those of a page / rows_per_page.

    Returns
    -------
    torch.Tensor, int64, shape (b, k)
        first + page * rows_per_page + local % rows_per_page, -1 where there is no page.

    Raises
    ------
    InvalidArgument
        If the table is not one of these rows.
    """
    import torch

    if page_table.ndim != 2 or local.ndim != 2 or len(page_table) != len(local):
        raise InvalidArgument(
            "[global_indices] page_table and local must be (b, pages) and (b, k), got "
            f"{tuple(page_table.shape)} and {tuple(local.shape)}"
        )
    local = local.long()
    column = local.div(rows_per_page, rounding_mode="floor")
    exists = (local >= 0) & (column < page_table.shape[1])
    if page_table.shape[1] == 0:
        return torch.full_like(local, -1)
    pages = page_table.long().gather(1, column.clamp(0, page_table.shape[1] - 1))
    rows = first + pages * rows_per_page + local % rows_per_page
    return rows.masked_fill(~exists | (pages < 0), -1)


def window_positions(lengths: torch.Tensor, window: int) -> torch.Tensor:
    """The tokens in each row's window, oldest first, int64 ``[b, window]``; -1 behind them."""
    import torch

    lengths = lengths.long()[:, None]
    count = lengths.clamp(max=window)
    place = torch.arange(window, device=lengths.device)[None]
    return (lengths - count + place).masked_fill(place >= count, -1)


def all_entries(lengths: torch.Tensor, ratio: int, width: int) -> torch.Tensor:
    """Every entry of each row, int64 ``[b, width]``, -1 behind them: what ratio 128 attends to."""
    import torch

    place = torch.arange(width, device=lengths.device)[None]
    exists = place < num_entries(lengths.long(), ratio)[:, None]
    return place.masked_fill(~exists, -1)


@dataclass(frozen=True)
class AttentionIndices:
    """What one layer's attention reads, as one index set: window rows, then compressed rows.

    Attributes
    ----------
    rows : torch.Tensor, int32, shape (b, window + k)
        Columns before `num_window` count rows of the window's pool, those behind them rows of the
        compressed entries' buffer or arena; -1 = none, anywhere.
    num_window : int
        Columns of the window.
    """

    rows: torch.Tensor
    num_window: int

    @property
    def window(self) -> torch.Tensor:
        """Rows of the window's pool, ``[b, window]``."""
        return self.rows[:, : self.num_window]

    @property
    def compressed(self) -> torch.Tensor:
        """Rows of compressed entries, ``[b, k]``; k = 0 in layers without them."""
        return self.rows[:, self.num_window :]


def check_row_count(name: str, count: int) -> None:
    """Refuse a buffer of more rows than int32, which is what kernels take, has numbers for.

    Raises
    ------
    InvalidArgument
        Naming the buffer.
    """
    if count > 2**31:
        raise InvalidArgument(
            f"[DeepseekV4CacheManager] rows of {name} must be <= 2^31, which kernels take, "
            f"got {count}; lower gpu_quota"
        )


def join(window: torch.Tensor, compressed: torch.Tensor | None) -> AttentionIndices:
    """Put both parts into one index set. Rows fit into int32, see `check_row_count`."""
    import torch

    parts = [window] if compressed is None else [window, compressed]
    rows = torch.cat([part.long() for part in parts], 1)
    return AttentionIndices(rows.to(torch.int32), window.shape[1])


def map_items(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    items: torch.Tensor,
    page: PageGeometry,
    items_per_page: int,
) -> SlotMapping:
    """Byte offsets of items of any rows, int ``[n]`` each; -1 = none.

    Parameters
    ----------
    page_table : torch.Tensor, int32, shape (b, pages)
    rows : torch.Tensor, int, shape (n,)
    items : torch.Tensor, int, shape (n,)
        Tokens, entries or inputs of a compressor.
    page : PageGeometry
        Of the buffer; a ring has fewer rows than a page has items.
    items_per_page : int
        A multiple of the page's rows.

    Raises
    ------
    InvalidArgument
        If the table, the items or the page cannot be.
    """
    items, ring = items.long(), page.tokens_per_block
    if page_table.ndim != 2 or items.ndim != 1 or rows.shape != items.shape:
        raise InvalidArgument(
            "[map_items] page_table, rows and items must be (b, pages), (n,) and (n,), got "
            f"{tuple(page_table.shape)}, {tuple(rows.shape)} and {tuple(items.shape)}"
        )
    if items_per_page < 1 or items_per_page % ring != 0:
        raise InvalidArgument(
            f"[map_items] items_per_page must be a multiple of the page's {ring} rows, "
            f"got {items_per_page}"
        )
    column = items.div(items_per_page, rounding_mode="floor")
    places = (column * ring + items % ring).masked_fill(items < 0, -1)
    return map_tokens(page_table, rows, places, page)
