"""From a model, budgets and lengths to bytes, the same for the plan and the allocation."""

from __future__ import annotations

from sparse_kvcm.sizing.allocate import Allocation, allocate, measure
from sparse_kvcm.sizing.capacity import Capacity, find_capacity
from sparse_kvcm.sizing.device import DeviceSizing, size_device
from sparse_kvcm.sizing.host import HostSizing, history_floor, size_host
from sparse_kvcm.sizing.host_memory import (
    HostMemory,
    HostTerm,
    effective_available_host_memory,
    host_memory,
)
from sparse_kvcm.sizing.ranks import (
    OtherRankError,
    Ranks,
    SingleRank,
    TorchRanks,
    on_every_rank,
)
from sparse_kvcm.sizing.worker import Machine, WorkerSizing, size_worker, workload_of
from sparse_kvcm.sizing.workload import Workload

__all__ = [
    "Allocation",
    "Capacity",
    "DeviceSizing",
    "HostMemory",
    "HostSizing",
    "HostTerm",
    "Machine",
    "OtherRankError",
    "Ranks",
    "SingleRank",
    "TorchRanks",
    "WorkerSizing",
    "Workload",
    "allocate",
    "effective_available_host_memory",
    "find_capacity",
    "history_floor",
    "host_memory",
    "measure",
    "on_every_rank",
    "size_device",
    "size_host",
    "size_worker",
    "workload_of",
]
