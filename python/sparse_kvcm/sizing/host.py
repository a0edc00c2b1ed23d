"""Host history: its floor, its automatic size, and what it may pin.

"No host memory" is a refusal under offload, never a silent fall-back: there is nowhere else to
have the history.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kvcm._core import (
    CacheTier,
    CacheTierConfig,
    InvalidArgument,
    StorageConfig,
    StorageLayout,
    planned_memory,
    sparse_backing_medium,
)
from sparse_kvcm.byte_counts import show_bytes
from sparse_kvcm.sizing.buffers import batch_memory
from sparse_kvcm.sizing.device import HOST_LEVEL
from sparse_kvcm.sizing.host_memory import HostMemory
from sparse_kvcm.sizing.workload import MAX_HISTORY_PAGES, Workload

FUNCTION = "size_host"


@dataclass(frozen=True)
class HostSizing:
    """Host history of one rank.

    Attributes
    ----------
    pages : int
        Pages of history, in every selection group.
    page_bytes : int
        Of one page, all selection groups together.
    staging : int
        Pinned bytes for uploads, beside the history.
    floor : int
        The least that ``host_history_size`` may be, staging included.
    is_automatic : bool
        Not set by the operator.
    """

    pages: int
    page_bytes: int
    staging: int
    floor: int
    is_automatic: bool

    @property
    def history_bytes(self) -> int:
        """What the manager pins; each pool's last page of the system may be used in part."""
        return self.pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """History and staging: what ``host_history_size`` counts."""
        return self.history_bytes + self.staging


def size_host(
    workload: Workload,
    batch: int,
    memory: HostMemory,
    *,
    host_history_size: int | None = None,
) -> HostSizing:
    """Size host history for `batch` requests.

    Parameters
    ----------
    workload : Workload
    batch : int
        Requests at a time.
    memory : HostMemory
        What may be pinned.
    host_history_size : int, optional
        What the operator wants, staging included. Without it: `batch` requests of the usual length,
        within ``memory.automatic``, raised to the floor.

    Raises
    ------
    InvalidArgument
        If the size is below the floor, or more than may be pinned. Names the size needed or the
        limit, and what to change.
    """
    staging = workload.num_batches * batch_memory(workload, batch).staging_bytes
    wanted = batch * workload.pages(workload.usual_seq_len) * page_bytes(workload) + staging
    floor = history_floor(workload) + staging
    if host_history_size is None:
        size = max(floor, min(wanted, memory.automatic))
        if size > memory.per_rank:
            raise InvalidArgument(
                f"[{FUNCTION}] host memory must be >= {floor} B ({show_bytes(floor)}) for the host "
                f"history of one request of max_seq_len {workload.max_seq_len}, got "
                f"{memory.per_rank} B for this rank ({memory.binding}, {memory.local_ranks} local "
                f"ranks); {memory.advice}, or lower max_seq_len"
            )
    else:
        size = host_history_size
        if size < floor:
            raise InvalidArgument(
                f"[{FUNCTION}] host_history_size must be >= {floor} B ({show_bytes(floor)}), for "
                f"one request of max_seq_len {workload.max_seq_len}, got {size}; raise it, lower "
                f"max_seq_len, or leave it out"
            )
        if size > memory.per_rank:
            raise InvalidArgument(
                f"[{FUNCTION}] host_history_size must be <= {memory.per_rank} B, what "
                f"{memory.binding} leaves to each of {memory.local_ranks} local ranks, got {size}; "
                f"{memory.advice}, or lower it"
            )
    pages = min(MAX_HISTORY_PAGES, (size - staging) // page_bytes(workload))
    return HostSizing(pages, page_bytes(workload), staging, floor, host_history_size is None)


def page_bytes(workload: Workload) -> int:
    """Bytes of one page of history, all selection groups together."""
    return planned_memory(workload.manager_config(batch=1, host_pages=1)).host_bytes


def history_floor(workload: Workload) -> int:
    """The least bytes of history.

    One request of max_seq_len at max_util_for_resume, in granules, and a granule more per pool.
    """
    quota = 1
    while True:  # granules grow with the quota
        layout = StorageLayout(_history_config(workload, quota))
        pages = layout.min_slots()[0]
        if pages > MAX_HISTORY_PAGES:
            raise InvalidArgument(
                f"[{FUNCTION}] max_seq_len must be one whose pages at max_util_for_resume number "
                f"{MAX_HISTORY_PAGES} at most, got {pages} pages of {workload.tokens_per_block} "
                f"tokens; raise tokens_per_block or max_util_for_resume"
            )
        bytes_needed = layout.get_num_bytes(0, pages)
        bytes_needed += layout.granule_bytes(HOST_LEVEL) * len(layout.pool_groups[0].slot_bytes)
        if bytes_needed <= quota:
            return bytes_needed
        quota = bytes_needed


def _history_config(workload: Workload, quota: int) -> StorageConfig:
    geometry = workload.geometry
    return StorageConfig(
        cache_tiers=[
            CacheTierConfig(CacheTier.GPU_MEM, 1),
            CacheTierConfig(sparse_backing_medium(), quota),
        ],
        layers=geometry.sparse_layers(workload.tokens_per_block, workload.kv_dtype),
        selection_groups=workload.selection_groups(),
        constraints=[workload.decode_step(1, workload.max_seq_len)],
        **workload.storage_fields(),
    )
