"""`sparse_mla_decode` in plain torch: for machines without Triton, and for small problems.

The same arguments and meaning, in float32 of gathered and decoded units, which take memory for
b x k of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparse_kvcm.adapter.scatter import gather_regions
from sparse_kvcm.adapter.slot_mapping import map_slots
from sparse_kvcm.attention.layouts import RecordLayout
from sparse_kvcm.attention.mla_checks import check_decode
from sparse_kvcm.attention.sparse_mla import KeyPart
from sparse_kvcm.deepseek_v4.codecs import decode_entries
from sparse_kvcm.dsa.codecs import decode_latents

if TYPE_CHECKING:
    import torch

FUNCTION = "sparse_mla_torch"


def sparse_mla_torch(
    q: torch.Tensor,
    pool: torch.Tensor | Sequence[torch.Tensor],
    rows: torch.Tensor,
    *,
    layout: RecordLayout,
    softmax_scale: float,
    kv_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    window: KeyPart | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected units of each query; as `sparse_mla_decode`."""
    import torch

    parts = [KeyPart(pool, rows, layout, kv_scale)]
    if window is not None:
        parts.insert(0, window)
    check_decode(FUNCTION, q, parts, softmax_scale, sinks, out, lse)
    exists = torch.cat([part.rows for part in parts], 1) >= 0
    keys = torch.cat([_units(part) for part in parts], 1)
    scores = torch.einsum("bhd,bkd->bhk", q.float(), keys) * softmax_scale
    scores = scores.masked_fill(~exists[:, None], -torch.inf)
    sums = scores.logsumexp(-1)
    total = sums if sinks is None else torch.logaddexp(sums, sinks.float())
    weights = torch.where(exists[:, None], (scores - total[..., None]).exp(), 0.0)
    values = torch.einsum("bhk,bkd->bhd", weights, keys[..., : layout.value_width])
    if out is None:
        out = torch.empty_like(values, dtype=torch.bfloat16)
    if lse is None:
        lse = torch.empty_like(sums)
    return out.copy_(values), lse.copy_(sums)


def _units(part: KeyPart) -> torch.Tensor:
    """Decoded units, float32 ``[b, k, width]``, zeros for none."""
    layout, buffers = part.layout, part.buffers
    layout.regions(buffers)  # refuses buffers that do not fit
    pages = [layout.page] if len(buffers) == 1 else layout.page.apart
    rows = part.rows.reshape(-1)
    record = gather_regions(
        list(zip(buffers, pages, strict=True)), lambda page: map_slots(rows, page)
    )
    rank, rope = layout.width - layout.rope, layout.rope
    if layout.value_width < layout.width:
        units = decode_latents(record, layout.kv_dtype, rank=rank, rope=rope, scale=part.kv_scale)
    else:
        units = decode_entries(
            record, layout.kv_dtype, head_dim=layout.width, rope=rope, scale=part.kv_scale
        )
    return units.view(*part.rows.shape, layout.width)
