"""Writing and reading records of tokens in pages, by the offsets of a slot mapping.

The first form: torch's indexed reads and writes, on any device. Tokens without a place are left
out, which waits for a GPU; a caller whose mapping has none, since padding names a trash page, says
so by `skip`, and the call can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sparse_kvcm._core import InvalidArgument

if TYPE_CHECKING:
    import torch

    from sparse_kvcm.dsa.slot_mapping import SlotMapping

Skip = Literal["missing", "none"]


def scatter(
    pool: torch.Tensor,
    mapping: SlotMapping,
    record: tuple[torch.Tensor, ...],
    *,
    skip: Skip = "missing",
) -> None:
    """Write the records of tokens to their places.

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
        Whether there may be tokens without a place.

    Raises
    ------
    InvalidArgument
        If an array does not fit. Offsets are not looked at, but for being negative.
    """
    _check_record(mapping, record)
    places = _places("scatter", pool, mapping)
    for (view, page, token), offsets, rows in zip(places, mapping.regions, record, strict=True):
        present = slice(None) if skip == "none" else offsets >= 0
        view[page[present], token[present]] = rows[present]


def gather(pool: torch.Tensor, mapping: SlotMapping) -> tuple[torch.Tensor, ...]:
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


def _check_record(mapping: SlotMapping, record: tuple[torch.Tensor, ...]) -> None:
    import torch

    shapes = [(len(mapping.data), size) for _, size in mapping.page.regions]
    got = [tuple(rows.shape) for rows in record]
    if got != shapes or any(rows.dtype != torch.uint8 for rows in record):
        raise InvalidArgument(f"[scatter] record must be uint8 of shapes {shapes}, got {got}")
