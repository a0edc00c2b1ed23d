"""Device memory beside the pools: the arena, its metadata, Batches, and what an engine adds.

Page and row sizes are asked of the native layouts. The list of arrays in a Batch repeats
BatchMemory in cpp/src/manager, and a test holds it against the addresses of a real Batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparse_kvcm._core import KvCacheManagerConfig, StorageLayout, storage_config
from sparse_kvcm.sizing.workload import Workload

KV_TILE = 128  # rows that attention on NVFP4 reads at once
_ALIGNMENT = 256  # of the arrays of a Batch
_WORD = 4  # int32, uint32, an entry
_ROW_STATE = 8 * _WORD
_STEP_STATE = 2 * _WORD


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


def arena_bytes(config: KvCacheManagerConfig) -> int:
    """Leases of all member layers, the trash page included."""
    pages = config.arena_pages + 1
    return sum(
        pages * group.layout.page_bytes(config.units_per_page) * len(group.layers)
        for group in config.groups
    )


def entry_bytes(config: KvCacheManagerConfig) -> int:
    """Entries of all slots and clocks of all leases, per selection group."""
    slots = config.arena_pages * config.units_per_page
    return len(config.groups) * (slots + config.max_leases) * _WORD


def batch_bytes(config: KvCacheManagerConfig, max_rows: int, max_units: int) -> int:
    """One Batch: row states, page tables, error words, resolve's outputs of all groups."""
    groups = len(config.groups)
    layer_groups = len(StorageLayout(storage_config(config)).layer_groups)
    pages = math.ceil(max_units / config.units_per_page)
    sizes = [
        max_rows * _ROW_STATE,
        layer_groups * max_rows * pages * _WORD,
        layer_groups * max_rows * _WORD,
        _STEP_STATE,
        (groups * max_rows + 1 + 2 * groups) * _WORD,
    ]
    for group in config.groups:
        words = [group.top_k, config.max_new_units, group.top_k, group.top_k, 1, 1, 1]
        sizes += [max_rows * count * _WORD for count in words]
    return sum(_round_up(size, _ALIGNMENT) for size in sizes)


def staging_bytes(workload: Workload, max_rows: int) -> int:
    """Pinned host memory of a Batch's uploads: two chunks, a power of two each."""
    pages = math.ceil(workload.max_units / workload.units_per_page)
    upload = max(64 << 10, max_rows * (_ROW_STATE + pages * _WORD))
    return 2 * (1 << (upload - 1).bit_length())


def engine_buffers(
    workload: Workload, layout: StorageLayout, max_rows: int, *, offload: bool
) -> list[BufferSpec]:
    """What attention needs beside the pools and the arena.

    Page tables of dense layers, as slots and converted; under offload the selection as indices,
    one set for all groups since they take turns.
    """
    pages = _round_up(workload.pages(workload.max_seq_len), 4)
    specs = []
    for index, group in enumerate(layout.layer_groups):
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
            rows = _round_up(max_rows * top_k, KV_TILE) + KV_TILE  # the last tile is zero
            unit_bytes = workload.geometry.unit_layout(workload.kv_dtype).unit_bytes
            specs.append(BufferSpec("nvfp4_scratch", (rows, unit_bytes), 1))
    return specs


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
