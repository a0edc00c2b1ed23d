"""Our implementations of sparse MLA, as `AttentionRegistry` wants them: both read arena rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparse_kvcm.attention.dispatch import AttentionImplementation, AttentionRegistry
from sparse_kvcm.attention.mla_torch import sparse_mla_torch
from sparse_kvcm.attention.pointers import AttentionBase
from sparse_kvcm.attention.sparse_mla import sparse_mla_decode

if TYPE_CHECKING:
    import torch


def _triton(base: AttentionBase, q: torch.Tensor, rows: torch.Tensor, **options: Any) -> Any:
    return sparse_mla_decode(q, base.buffers, rows, layout=base.layout, **options)


def _torch(base: AttentionBase, q: torch.Tensor, rows: torch.Tensor, **options: Any) -> Any:
    return sparse_mla_torch(q, base.buffers, rows, layout=base.layout, **options)


TRITON_SPARSE_MLA = AttentionImplementation("triton_sparse_mla", _triton, reads_arena_rows=True)
TORCH_SPARSE_MLA = AttentionImplementation("torch_sparse_mla", _torch, reads_arena_rows=True)


def mla_registry(device: str) -> AttentionRegistry:
    """Implementations for a device, in order of preference: Triton's first where it compiles."""
    on_gpu = device.startswith("cuda")
    return AttentionRegistry(
        [TRITON_SPARSE_MLA, TORCH_SPARSE_MLA] if on_gpu else [TORCH_SPARSE_MLA]
    )
