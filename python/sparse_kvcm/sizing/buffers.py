"""Device memory beside the pools: the arena, its metadata, Batches, and what an engine adds.

What the native code allocates is asked of the native code; here are only the engine's own arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from sparse_kvcm._core import (
    BatchMemoryUse,
    MemoryUse,
    StorageLayout,
    planned_batch_memory,
    planned_memory,
)
from sparse_kvcm.models.kv_scratch import scratch_rows
from sparse_kvcm.sizing.workload import Workload

_WORD = 4  # int32


@dataclass(frozen=True)
class BufferSpec:
    """An array that the engine allocates, in bytes."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.item_bytes


@lru_cache(maxsize=1024)  # a search asks for the same batches again and again
def manager_memory(workload: Workload, batch: int) -> MemoryUse:
    """What the arena and its metadata take for `batch` requests, as the manager allocates it."""
    return planned_memory(workload.manager_config(batch))


@lru_cache(maxsize=1024)
def batch_memory(workload: Workload, max_rows: int) -> BatchMemoryUse:
    """What a Batch of so many rows takes of the device, and of pinned memory for staging."""
    config = workload.manager_config(max_rows)
    return planned_batch_memory(config, max_rows, workload.max_units)


def engine_buffers(
    workload: Workload, layout: StorageLayout, max_rows: int, *, offload: bool
) -> list[BufferSpec]:
    """What attention needs beside the pools and the arena.

    Page tables of dense layers, converted to indices of pages; under offload the selection as
    indices, one set for all groups since they take turns. Tables of slots are the Batch's; a worker
    without one, which does not offload, has its own.
    """
    pages = _round_up(workload.pages(workload.max_seq_len), 4)
    specs = []
    for index, group in enumerate(layout.layer_groups):
        if group.life_cycle.is_sparse:
            continue
        if not offload:
            specs.append(BufferSpec(f"page_table_{index}", (max_rows, pages), _WORD))
        for pool, buffer in enumerate(group.slot):
            first = buffer.buffers[0]
            expansion = layout.place(first.layer_id, first.role).converter.expansion
            shape = (max_rows, pages * expansion)
            specs.append(BufferSpec(f"page_indices_{index}_{pool}", shape, _WORD))
    if offload:
        top_k = workload.geometry.top_k
        specs.append(BufferSpec("attention_indices", (max_rows, top_k), _WORD))
        if workload.kv_dtype.startswith("nvfp4"):
            rows = scratch_rows(max_rows, top_k)
            unit_bytes = workload.geometry.unit_layout(workload.kv_dtype).unit_bytes
            specs.append(BufferSpec("nvfp4_scratch", (rows, unit_bytes), 1))
    return specs


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
