"""Checks of tensors that Triton's functions take: they address memory by what is said here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparse_kvcm._core import InvalidArgument

if TYPE_CHECKING:
    import torch

    from sparse_kvcm.attention.layouts import Region


def check_tensor(
    function: str,
    name: str,
    value: Any,
    dtypes: Sequence[str],
    shape: tuple[int | None, int | None],
    device: torch.device | None = None,
) -> None:
    """Check a matrix whose rows are contiguous, at any stride; None in `shape`: any extent.

    Raises
    ------
    InvalidArgument
        Naming the argument, what it must be, and what it is.
    """
    _check_kind(function, name, value, dtypes, device)
    fits = value.ndim == 2 and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise InvalidArgument(
            f"[{function}] {name} must have shape ({wanted}), got {tuple(value.shape)}"
        )
    strides = value.stride()
    if (value.shape[1] > 1 and strides[1] != 1) or strides[0] < 0:
        raise InvalidArgument(
            f"[{function}] {name} must have contiguous rows, got strides {strides}; call "
            ".contiguous() first"
        )


def check_vector(
    function: str,
    name: str,
    value: Any,
    dtypes: Sequence[str],
    length: int,
    device: torch.device | None = None,
    *,
    any_stride: bool = False,
) -> None:
    """Check a vector, contiguous unless `any_stride`.

    Raises
    ------
    InvalidArgument
        Naming the argument, what it must be, and what it is.
    """
    _check_kind(function, name, value, dtypes, device)
    if value.ndim != 1 or value.shape[0] != length:
        raise InvalidArgument(
            f"[{function}] {name} must have shape ({length},), got {tuple(value.shape)}"
        )
    if not any_stride and length > 1 and value.stride(0) != 1:
        raise InvalidArgument(
            f"[{function}] {name} must be contiguous, got strides {value.stride()}"
        )


def check_region(function: str, region: Region, device: torch.device) -> None:
    """Check that a kernel can address a region.

    Raises
    ------
    InvalidArgument
        If it is elsewhere, or not aligned as every part of a record is.
    """
    pages = region.pages
    if pages.device != device:
        raise InvalidArgument(
            f"[{function}] buffers must be on {device}, where the others are, got {pages.device}"
        )
    if pages.data_ptr() % 4 or region.page_stride % 4:
        raise InvalidArgument(
            f"[{function}] buffers must be aligned to 4 bytes, got address {pages.data_ptr()} and "
            f"{region.page_stride} bytes from page to page"
        )


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`, which Triton's blocks are."""
    return 1 << max(value - 1, 0).bit_length()


def _check_kind(
    function: str, name: str, value: Any, dtypes: Sequence[str], device: torch.device | None
) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"[{function}] {name} must be a torch.Tensor, got {type(value).__name__}"
        )
    if value.layout != torch.strided or value.dtype not in [getattr(torch, one) for one in dtypes]:
        raise InvalidArgument(
            f"[{function}] {name} must be {' or '.join(dtypes)}, strided, got {value.dtype}, "
            f"{value.layout}"
        )
    if device is not None and value.device != device:
        raise InvalidArgument(
            f"[{function}] {name} must be on {device}, where the others are, got {value.device}"
        )
