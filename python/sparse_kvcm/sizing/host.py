"""Host memory of an offloading worker: history, its floor and automatic size, what is beside it.

"No host memory" is a refusal under offload, never a silent fall-back: there is nowhere else to
have the history.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kvcm._core import (
    MAX_HOST_PAGES,
    InvalidArgument,
    StorageLayout,
    planned_memory,
    storage_config,
)
from sparse_kvcm.byte_counts import show_bytes
from sparse_kvcm.sizing.buffers import batch_memory
from sparse_kvcm.sizing.host_memory import HostMemory
from sparse_kvcm.sizing.workload import Workload

FUNCTION = "size_host"


@dataclass(frozen=True)
class HostSizing:
    """Host memory of one rank.

    Attributes
    ----------
    pages : int
        Pages of history, in every selection group.
    page_bytes : int
        Of one page, all selection groups together.
    staging : int
        Pinned bytes for uploads and for transfers, beside the history.
    cold : int
        Pinned bytes for pages of suspended requests' dense layers, beside both.
    floor : int
        The least that ``host_history_size`` may be, staging included.
    is_automatic : bool
        Not set by the operator.
    """

    pages: int
    page_bytes: int
    staging: int
    cold: int
    floor: int
    is_automatic: bool

    @property
    def history_bytes(self) -> int:
        """What history takes; each pool's last page of the system may be used in part."""
        return self.pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """History and staging: what ``host_history_size`` counts."""
        return self.history_bytes + self.staging

    @property
    def pinned_bytes(self) -> int:
        """All that the rank pins."""
        return self.total_bytes + self.cold


def size_host(
    workload: Workload,
    batch: int,
    memory: HostMemory,
    *,
    host_history_size: int | None = None,
) -> HostSizing:
    """Size the host memory of `batch` requests.

    Pages of suspended requests come off `memory` first.

    Parameters
    ----------
    workload : Workload
    batch : int
        Requests at a time.
    memory : HostMemory
        What may be pinned.
    host_history_size : int, optional
        What the operator wants, staging included. Without it: `batch` requests of the usual length,
        within half of what is left, raised to the floor.

    Raises
    ------
    InvalidArgument
        If the size is below the floor, or more than may be pinned. Names the size needed or the
        limit, and what to change.
    """
    page = page_bytes(workload)
    staging = staging_bytes(workload, batch)
    floor = history_floor(workload) + staging
    cold = 0
    while True:  # cold pools have granules, which grow with the history
        if host_history_size is None:
            wanted = batch * workload.pages(workload.usual_seq_len) * page + staging
            size = _automatic_size(workload, memory, wanted, floor, cold)
        else:
            size = _explicit_size(workload, memory, host_history_size, floor, cold)
        pages = min(MAX_HOST_PAGES, (size - staging) // page)
        needed = cold_bytes(workload, pages)
        if needed <= cold:
            return HostSizing(pages, page, staging, needed, floor, host_history_size is None)
        cold = needed


def _automatic_size(
    workload: Workload, memory: HostMemory, wanted: int, floor: int, cold: int
) -> int:
    left = _left_beside(workload, memory, cold)
    size = max(floor, min(wanted, left.automatic))
    if size > left.per_rank:
        needed = floor + cold
        raise InvalidArgument(
            f"[{FUNCTION}] host memory must be >= {needed} B ({show_bytes(needed)}) for the host "
            f"history of one request of max_seq_len {workload.max_seq_len}, got "
            f"{memory.per_rank} B for this rank ({memory.limit}, {memory.local_ranks} local "
            f"ranks); {memory.advice}, or lower max_seq_len"
        )
    return size


def _explicit_size(workload: Workload, memory: HostMemory, size: int, floor: int, cold: int) -> int:
    if size < floor:
        raise InvalidArgument(
            f"[{FUNCTION}] host_history_size must be >= {floor} B ({show_bytes(floor)}), for "
            f"one request of max_seq_len {workload.max_seq_len}, got {size}; raise it, lower "
            f"max_seq_len, or leave it out"
        )
    left = _left_beside(workload, memory, cold)
    if size > left.per_rank:
        raise InvalidArgument(
            f"[{FUNCTION}] host_history_size must be <= {left.per_rank} B, what {memory.limit} "
            f"leaves to each of {memory.local_ranks} local ranks, got {size}; {memory.advice}, "
            f"or lower it"
        )
    return size


def _left_beside(workload: Workload, memory: HostMemory, cold: int) -> HostMemory:
    if workload.host_cache_size:
        check_cache(workload, memory, cold)
    return memory.without(cold)


def check_cache(workload: Workload, memory: HostMemory, needed: int) -> None:
    """Refuse a ``host_cache_size`` that takes more than may be pinned."""
    if needed > memory.per_rank:
        raise InvalidArgument(
            f"[{FUNCTION}] host_cache_size must be <= {memory.per_rank} B, what {memory.limit} "
            f"leaves to each of {memory.local_ranks} local ranks, got {workload.host_cache_size}, "
            f"which takes {needed} B; {memory.advice}, or lower it"
        )


def staging_bytes(workload: Workload, batch: int) -> int:
    """Pinned bytes for uploads of all Batches, and for transfers that land."""
    uploads = workload.num_batches * batch_memory(workload, batch).staging_bytes
    return uploads + workload.transfer_staging


def page_bytes(workload: Workload) -> int:
    """Bytes of one page of history, all selection groups together."""
    return planned_memory(workload.manager_config(1)).host_bytes


def cold_bytes(workload: Workload, host_pages: int) -> int:
    """Bytes for suspended requests' pages beside so many pages of history."""
    return planned_memory(workload.manager_config(1, host_pages)).cold_bytes


def history_floor(workload: Workload) -> int:
    """The least bytes of history.

    One request of max_seq_len at max_util_for_resume, in granules, and a granule more per pool.
    """
    layout = _history_layout(workload, 1)
    history = next(i for i, group in enumerate(layout.pool_groups) if group.is_sparse)
    pages = layout.min_slots()[history]
    if pages > MAX_HOST_PAGES:
        raise InvalidArgument(
            f"[{FUNCTION}] max_seq_len must be one whose pages at max_util_for_resume number "
            f"{MAX_HOST_PAGES} at most, got {pages} pages of {workload.tokens_per_block} "
            f"tokens; raise tokens_per_block or max_util_for_resume"
        )
    layout = _history_layout(workload, pages)
    pools = len(layout.pool_groups[history].slot_bytes)
    granule = layout.granule_bytes(layout.pool_groups[history].level)
    return layout.get_num_bytes(history, pages) + pools * granule


def _history_layout(workload: Workload, host_pages: int) -> StorageLayout:
    longest = workload.decode_step(1, workload.max_seq_len)
    config = workload.manager_config(1, host_pages, constraints=[longest])
    return StorageLayout(storage_config(config))
