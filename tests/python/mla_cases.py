"""Pools of units with known elements, queries, and attention in float64 as its formula says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import sparse_kvcm as kvcm
from sparse_kvcm.attention import RecordLayout, dsa_layout, v4_layout
from sparse_kvcm.deepseek_v4 import codecs as v4_codecs
from sparse_kvcm.dsa import codecs as dsa_codecs
from sparse_kvcm.models import geometry_of

torch.set_num_threads(1)
KV_SCALE = 0.37  # no power of two
LAYOUTS = (
    "dsa/bf16", "dsa/fp8", "dsa/fp8_ds_mla", "dsa/nvfp4", "dsa/nvfp4_ds_mla",
    "v4/bf16", "v4/fp8", "v4/fp8_ds_mla", "v4/nvfp4",
)  # fmt: skip
BF16_ROUNDING = 2.0**-8  # half of a last bit, of 8


def device_or_skip(device: str) -> str:
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles here, and interprets where there is no GPU")
        pytest.importorskip("triton")
        return device
    if kvcm.cuda_is_available() and torch.cuda.is_available():
        return "cuda:0"
    if os.environ.get("SPARSE_KVCM_REQUIRE_CUDA"):
        pytest.fail("SPARSE_KVCM_REQUIRE_CUDA is set and there is no GPU")
    pytest.skip("no GPU")


def layout_of(name: str, size: str = "small", units_per_page: int = 64) -> RecordLayout:
    """The model's widths, or small ones with the same structure."""
    model, kv_dtype = name.split("/")
    full = size == "full"
    if model == "dsa":
        config: dict[str, Any] = {
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": 2,
            "indexer_types": ["full", "shared"],
            "kv_lora_rank": 512 if full else 128,
            "qk_rope_head_dim": 64,
            "index_topk": 2048,
            "max_position_embeddings": 1 << 20,
        }
        return dsa_layout(geometry_of(config), kv_dtype, units_per_page)
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 2,
        "compress_ratios": [0, 4],
        "head_dim": 512 if full else 256,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_topk": 512,
        "max_position_embeddings": 1 << 20,
    }
    return v4_layout(geometry_of(config), kv_dtype, units_per_page)


def encode(layout: RecordLayout, elements: torch.Tensor, scale: float = KV_SCALE) -> Any:
    if layout.name.startswith("dsa"):
        return dsa_codecs.encode_latents(
            elements, layout.kv_dtype, rank=layout.value_width, scale=scale
        )
    return v4_codecs.encode_entries(elements, layout.kv_dtype, rope=layout.rope, scale=scale)


def decode(layout: RecordLayout, record: Any, scale: float = KV_SCALE) -> torch.Tensor:
    if layout.name.startswith("dsa"):
        rank = layout.value_width
        return dsa_codecs.decode_latents(
            record, layout.kv_dtype, rank=rank, rope=layout.rope, scale=scale
        )
    return v4_codecs.decode_entries(
        record, layout.kv_dtype, head_dim=layout.width, rope=layout.rope, scale=scale
    )


def operands(layout: RecordLayout, units: torch.Tensor, scale: float = KV_SCALE) -> torch.Tensor:
    """Elements as the kernel multiplies them, float64: BF16 of what is stored, then the scale.

    Only FlashMLA's FP8 records of DSA have elements that BF16 does not hold.
    """
    factor = torch.full((layout.width,), scale if layout.tensor_scale else 1.0).double()
    if layout.kv_dtype == "nvfp4_ds_mla":
        factor[layout.value_width :] = 1.0
    stored = units.double() / factor.to(units.device)
    rounded = stored.to(torch.bfloat16).double()
    close = 1e-6 if layout.name != "dsa/fp8_ds_mla" else BF16_ROUNDING * 1.01
    torch.testing.assert_close(rounded, stored, rtol=close, atol=0)
    return rounded * factor.to(units.device)


@dataclass
class Pool:
    """Units in pages, everything else poison, and what attention makes of them."""

    layout: RecordLayout
    buffers: list[torch.Tensor]
    places: torch.Tensor  # the slot of each unit
    elements: torch.Tensor  # float64 [units, width], as `operands` says
    exact: torch.Tensor  # the same, as stored

    def rows(self, selection: torch.Tensor) -> torch.Tensor:
        """Slots of a selection of units, -1 kept."""
        found = self.places.to(selection.device)[selection.long().clamp(min=0)]
        return torch.where(selection >= 0, found, -1).to(torch.int32)


def pool_of(
    layout: RecordLayout,
    elements: torch.Tensor,
    slots: torch.Tensor,
    *,
    pages: int,
    split: str = "one",
    stride_pages: int = 1,
    poison: int = 0xFF,
) -> Pool:
    """Store elements at slots.

    `split` "regions" gives each region a buffer; pages are every `stride_pages`-th of their buffer.
    """
    record = encode(layout, elements)
    units, regions = layout.units_per_page, layout.page.regions
    device = elements.device
    sizes = [layout.page.page_bytes]
    if split == "regions":
        sizes = [units * size for _, size in regions]
    buffers = []
    for size in sizes:
        whole = torch.full((pages * stride_pages, size), poison, dtype=torch.uint8, device=device)
        buffers.append(whole[::stride_pages])
    for index, ((offset, size), codes) in enumerate(zip(regions, record, strict=True)):
        begin = 0 if len(buffers) > 1 else offset
        buffer = buffers[index if len(buffers) > 1 else 0]
        region = buffer[:, begin : begin + units * size].unflatten(1, (units, size))
        region[slots // units, slots % units] = codes
    stored = decode(layout, record)
    return Pool(layout, buffers, slots, operands(layout, stored), stored.double())


def attend(
    q: torch.Tensor,
    parts: list[tuple[Pool, torch.Tensor]],
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and logarithms of sums in float64; parts are pools and selections of units."""
    outs, sums = [], []
    for i, query in enumerate(q.double()):
        keys = torch.cat(
            [pool.elements[chosen[i][chosen[i] >= 0].long()] for pool, chosen in parts]
        )
        scores = query @ keys.T * softmax_scale
        total = torch.logsumexp(scores, 1)
        bottom = total if sinks is None else torch.logaddexp(total, sinks.double())
        weights = (scores - bottom[:, None]).exp()
        outs.append(weights @ keys[:, : parts[0][0].layout.value_width])
        sums.append(total)
    return torch.stack(outs), torch.stack(sums)


def check(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    largest: float,
    k: int,
) -> None:
    """Compare with float64.

    Keys are the same numbers (`operands`). Weights are rounded to BF16, so a sum of weights x
    values is off by 2^-8 of the largest value at most; k float32 additions add k x 2^-24 of it.
    Scores are sums of float32 products: their error, and that of exp2 and log2, is some 2^-20.
    """
    bound = (BF16_ROUNDING + k * 2.0**-24) * largest
    torch.testing.assert_close(got[0].double(), want[0], rtol=2**-16, atol=bound)
    torch.testing.assert_close(got[1].double(), want[1], rtol=2**-16, atol=2**-14)
