"""Writing and reading records of tokens in pages, by the offsets of a slot mapping.

Torch's indexed reads and writes, on any device. No shape depends on what is in an array, so nothing
waits for a GPU and both can be captured in a CUDA graph. A token without a place therefore is not
left out: it writes the first token with one once more, the same bytes to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.slot_mapping import PageGeometry, SlotMapping

if TYPE_CHECKING:
    import torch

Record: TypeAlias = "tuple[torch.Tensor, ...]"  # uint8 [n, region_bytes] of each region
Pages: TypeAlias = "tuple[torch.Tensor, PageGeometry]"  # a buffer, and how tokens lie in it
Skip = Literal["missing", "none"]


def scatter(
    pool: torch.Tensor,
    mapping: SlotMapping,
    record: Record,
    *,
    skip: Skip = "missing",
) -> None:
    """Write the records of tokens to their places; those without one, such as padding, nowhere.

    Parameters
    ----------
    pool : torch.Tensor, uint8, shape (pages, ...)
        Dimensions behind the first are the bytes of one page, contiguous. Pages lie at any stride,
        such as in a pool whose slots have more than this buffer.
    mapping : SlotMapping
        Of n tokens, no two in one place.
    record : tuple of torch.Tensor, uint8, shape (n, region_bytes)
        One per region of the mapping, as `codecs` makes them, on the pool's device.
    skip : {"missing", "none"}
        "none": every token has a place, such as a trash page, which saves the detour.

    Raises
    ------
    InvalidArgument
        If an array does not fit. Offsets are not looked at, but for being negative.
    """
    _check_record(mapping, record)
    places = _places("scatter", pool, mapping)
    if len(mapping.data) == 0 or len(pool) == 0:
        return
    if skip == "none":
        for (view, page, token), rows in zip(places, record, strict=True):
            view[page, token] = rows
        return
    present, source = _sources(mapping.data)
    for (view, page, token), rows in zip(places, record, strict=True):
        pages, tokens = page[source].clamp(min=0), token[source]
        # Where no token has a place, what lies in the first page is written back.
        view[pages, tokens] = rows[source].where(present, view[pages, tokens])


def gather(pool: torch.Tensor, mapping: SlotMapping) -> Record:
    """Read the records of tokens: the reverse of `scatter`.

    Returns
    -------
    tuple of torch.Tensor, uint8, shape (n, region_bytes)
        One per region; zeros for tokens without a place.
    """
    places = _places("gather", pool, mapping)
    return tuple(
        view[page.clamp(min=0), token].masked_fill((page < 0)[:, None], 0)
        for view, page, token in places
    )


def scatter_regions(
    buffers: Sequence[Pages], record: Record, map_to: Callable[[PageGeometry], SlotMapping]
) -> None:
    """`scatter` to a buffer of all regions, or to one per region; `map_to` finds places in each."""
    for pool, page in buffers:
        regions = len(page.regions)
        scatter(pool, map_to(page), record[:regions])
        record = record[regions:]


def gather_regions(
    buffers: Sequence[Pages], map_to: Callable[[PageGeometry], SlotMapping]
) -> Record:
    """`gather` from such buffers: the whole record."""
    return tuple(rows for pool, page in buffers for rows in gather(pool, map_to(page)))


def _sources(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether any token has a place, and for each token the one that is written instead."""
    import torch

    present = offsets >= 0
    first = present.to(torch.int32).argmax()  # the first of the largest
    return present.any(), torch.arange(len(offsets), device=offsets.device).where(present, first)


def _places(
    function: str, pool: torch.Tensor, mapping: SlotMapping
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each region as ``[pages, tokens_per_block, region_bytes]``, not copied, and where tokens are.

    Page and place in it, int64 ``[n]``. Page -1 = nowhere.
    """
    page = mapping.page
    flat = _flat(function, pool, page.page_bytes)
    places = []
    for offsets, (begin, size) in zip(mapping.regions, page.regions, strict=True):
        region = flat[:, begin : begin + page.tokens_per_block * size]
        view = region.view(len(flat), page.tokens_per_block, size)
        index = offsets.div(page.page_bytes, rounding_mode="floor")
        token = (offsets - index * page.page_bytes - begin).div(size, rounding_mode="floor")
        places.append((view, index, token.clamp(0, page.tokens_per_block - 1)))
    return places


def _flat(function: str, pool: torch.Tensor, page_bytes: int) -> torch.Tensor:
    import torch

    if pool.dtype == torch.uint8 and pool.ndim >= 2:
        try:
            return pool.view(pool.shape[0], page_bytes)
        except RuntimeError:
            pass  # other bytes, or not contiguous
    raise InvalidArgument(
        f"[{function}] pool must be uint8 (pages, ...), the {page_bytes} bytes of a page "
        f"contiguous, got {pool.dtype} {tuple(pool.shape)} at strides {pool.stride()}"
    )


def _check_record(mapping: SlotMapping, record: Record) -> None:
    import torch

    shapes = [(len(mapping.data), size) for _, size in mapping.page.regions]
    got = [tuple(rows.shape) for rows in record]
    if got != shapes or any(rows.dtype != torch.uint8 for rows in record):
        raise InvalidArgument(f"[scatter] record must be uint8 of shapes {shapes}, got {got}")
