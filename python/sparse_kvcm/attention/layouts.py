"""How attention kernels find the parts of a stored unit: latents of DSA, entries of DeepSeek-V4.

A record's bytes are those of the codecs in `sparse_kvcm.dsa` and `sparse_kvcm.deepseek_v4`; this is
where they lie. A unit has one piece in each *region* of a page, and its *parts* lie in them:

    model  kv_dtype      regions    parts of a unit, region:byte (full widths)
    DSA    bf16          1,152      0:0 576 BF16
           fp8           576        0:0 576 E4M3, the scale of the tensor is kept outside
           fp8_ds_mla    656        0:0 512 E4M3, 0:512 4 FP32 scales, 0:528 64 BF16 rotary
           nvfp4         288 + 36   0:0 576 E2M1, 1:0 36 E4M3 scales
           nvfp4_ds_mla  352        0:0 512 E2M1, 0:256 64 E4M3 rotary, 0:320 32 E4M3 scales
    V4     bf16          1,024      0:0 512 BF16
           fp8           512        0:0 512 E4M3
           fp8_ds_mla    576 + 8    0:0 448 E4M3, 0:448 64 BF16 rotary, 1:0 7 E8M0 scales, padding
           nvfp4         256 + 32   0:0 512 E2M1, 1:0 32 E4M3 scales

The unit at slot s has its piece of region r at

    pages_r + s // units_per_page * page_stride_r + offset_r + s % units_per_page * unit_bytes_r

in bytes (`Region`). All regions of an arena lie in one buffer; pools have a buffer for each region
where scales have a role of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.slot_mapping import PageGeometry
from sparse_kvcm.models import DeepSeekV4Geometry, DsaGeometry, KvDtype

if TYPE_CHECKING:
    import torch

Format = Literal["bf16", "e4m3", "e2m1", "fp32", "e8m0"]
_BYTES = {"bf16": 2.0, "e4m3": 1.0, "e2m1": 0.5, "fp32": 4.0, "e8m0": 1.0}


@dataclass(frozen=True)
class Part:
    """Elements, or scales, of one format, side by side in a unit's piece of a region.

    Attributes
    ----------
    region : int
    offset : int
        Bytes from the beginning of the piece.
    format : str
        E2M1 has two elements to a byte, the even one in the lower half.
    count : int
        Elements, or scales.
    """

    region: int
    offset: int
    format: Format
    count: int

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return int(self.count * _BYTES[self.format])


@dataclass(frozen=True)
class Region:
    """Where a kernel finds one region of units.

    Attributes
    ----------
    pages : torch.Tensor, uint8, shape (pages, bytes)
        Bytes of a page contiguous.
    page_stride : int
        Bytes from page to page.
    offset : int
        Bytes from the beginning of a page to the piece of its first unit.
    unit_bytes : int
        Bytes of a piece, and from unit to unit.
    """

    pages: torch.Tensor
    page_stride: int
    offset: int
    unit_bytes: int


@dataclass(frozen=True)
class RecordLayout:
    """How one kind of unit is stored.

    Attributes
    ----------
    name : str
        Model and data type, such as "dsa/fp8_ds_mla".
    kv_dtype : str
        As in the codecs.
    page : PageGeometry
        Pages that have all regions, as an arena's.
    width : int
        Elements of a unit, the rotary ones last: what a query is multiplied with.
    value_width : int
        How many of them, from the first, are the value: 512 of 576 in DSA, all in DeepSeek-V4.
    rope : int
        Rotary elements.
    data : Part
        The first elements, or all.
    rotary : Part, optional
        The rotary elements where they are stored apart.
    scales : Part, optional
        One per `tile` elements of `data`.
    tile : int
        0 without scales.
    scale_columns : int
        Scale i lies in place ``i % c * (count / c) + i // c``; 1: in order.
    """

    name: str
    kv_dtype: KvDtype
    page: PageGeometry
    width: int
    value_width: int
    rope: int
    data: Part
    rotary: Part | None = None
    scales: Part | None = None
    tile: int = 0
    scale_columns: int = 1

    @property
    def units_per_page(self) -> int:
        """Units of a page."""
        return self.page.tokens_per_block

    @property
    def tensor_scale(self) -> bool:
        """Whether stored values count in units of a scale of the whole tensor, `kv_scale`."""
        return self.kv_dtype in ("fp8", "nvfp4", "nvfp4_ds_mla")

    def regions(self, buffers: Sequence[torch.Tensor]) -> list[Region]:
        """Find the regions in buffers.

        Parameters
        ----------
        buffers : sequence of torch.Tensor, uint8, shape (pages, page_bytes)
            One that has all regions, such as an arena, or one per region, each of its units alone.
            Dimensions behind the first are the bytes of a page, contiguous, in any element type;
            pages lie at any stride.

        Raises
        ------
        InvalidArgument
            If their number or their pages do not fit.
        """
        sizes = self.page.regions
        if len(buffers) == 1:
            pages = [_bytes(buffers[0], self.page.page_bytes, self.name)] * len(sizes)
            offsets = [offset for offset, _ in sizes]
        elif len(buffers) == len(sizes):
            units = self.units_per_page
            pages = [
                _bytes(one, units * size, self.name)
                for one, (_, size) in zip(buffers, sizes, strict=True)
            ]
            offsets = [0] * len(sizes)
        else:
            raise InvalidArgument(
                f"[RecordLayout] buffers of {self.name} must be 1, with all regions, or "
                f"{len(sizes)}, got {len(buffers)}"
            )
        return [
            Region(page, page.stride(0), offset, size)
            for page, offset, (_, size) in zip(pages, offsets, sizes, strict=True)
        ]


def dsa_layout(
    geometry: DsaGeometry, kv_dtype: KvDtype, tokens_per_block: int | None = None
) -> RecordLayout:
    """The latents of a DSA model, in pages of so many tokens (None: the usual page)."""
    tokens = tokens_per_block or geometry.tokens_per_block
    geometry.check_page(tokens, kv_dtype)
    rank, rope = geometry.kv_lora_rank, geometry.qk_rope_head_dim
    page = PageGeometry(geometry.unit_layout(kv_dtype), tokens)
    name, width = f"dsa/{kv_dtype}", rank + rope

    def layout(data: Part, rotary: Part | None, scales: Part | None, tile: int) -> RecordLayout:
        columns = 4 if kv_dtype == "nvfp4_ds_mla" else 1
        return RecordLayout(
            name, kv_dtype, page, width, rank, rope, data, rotary, scales, tile, columns
        )

    if kv_dtype == "fp8_ds_mla":
        tiles = rank // 128
        rotary = Part(0, rank + 4 * tiles, "bf16", rope)
        return layout(Part(0, 0, "e4m3", rank), rotary, Part(0, rank, "fp32", tiles), 128)
    if kv_dtype == "nvfp4_ds_mla":
        rotary = Part(0, rank // 2, "e4m3", rope)
        scales = Part(0, rank // 2 + rope, "e4m3", rank // 16)
        return layout(Part(0, 0, "e2m1", rank), rotary, scales, 16)
    return layout(*_uniform(kv_dtype, width))


def v4_layout(geometry: DeepSeekV4Geometry, kv_dtype: KvDtype, units_per_page: int) -> RecordLayout:
    """The entries of ratio 4 of a DeepSeek-V4 model, in pages of so many.

    Windows, and entries of ratio 128, have the layout of `sparse_kvcm.models.window_dtype`: FP8
    where entries are NVFP4.
    """
    page = PageGeometry(geometry.unit_layout(kv_dtype), units_per_page)
    name, width, rope = f"v4/{kv_dtype}", geometry.head_dim, geometry.qk_rope_head_dim
    if kv_dtype == "fp8_ds_mla":
        plain = width - rope
        data, rotary = Part(0, 0, "e4m3", plain), Part(0, plain, "bf16", rope)
        scales = Part(1, 0, "e8m0", plain // 64)
        return RecordLayout(name, kv_dtype, page, width, width, rope, data, rotary, scales, 64)
    return RecordLayout(name, kv_dtype, page, width, width, rope, *_uniform(kv_dtype, width))


def _uniform(kv_dtype: KvDtype, width: int) -> tuple[Part, None, Part | None, int]:
    """Data, rotary part, scales and tile where all elements are stored alike."""
    if kv_dtype == "nvfp4":
        return Part(0, 0, "e2m1", width), None, Part(1, 0, "e4m3", width // 16), 16
    return Part(0, 0, "bf16" if kv_dtype == "bf16" else "e4m3", width), None, None, 0


def _bytes(buffer: torch.Tensor, page_bytes: int, name: str) -> torch.Tensor:
    """Pages of a buffer as bytes, uint8 ``[pages, page_bytes]``, not copied."""
    import torch

    if buffer.ndim >= 2:
        try:
            return buffer.view(torch.uint8).view(len(buffer), page_bytes)
        except RuntimeError:
            pass  # other bytes, or not contiguous
    raise InvalidArgument(
        f"[RecordLayout] buffers of {name} must be (pages, ...), the {page_bytes} bytes of a page "
        f"contiguous, got {buffer.dtype} {tuple(buffer.shape)} at strides {buffer.stride()}"
    )
