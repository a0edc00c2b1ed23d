"""Allocating what was sized, and measuring it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparse_kvcm._core import Batch, InvalidState, KvCacheManager, Storage
from sparse_kvcm.sizing.device import GPU_LEVEL, HOST_LEVEL
from sparse_kvcm.sizing.ranks import Ranks, SingleRank, on_every_rank
from sparse_kvcm.sizing.worker import WorkerSizing


@dataclass
class Allocation:
    """A worker's memory. It goes back with the last reference to this.

    Attributes
    ----------
    storage : Storage
        Pools of layers whose pages are on the GPU: the manager's, under offload.
    manager : KvCacheManager, optional
        Under offload: it holds everything but the engine's buffers.
    batches : list of Batch
    engine : list of dict
        Attention buffers by name, one set per Batch.
    """

    storage: Storage
    manager: KvCacheManager | None = None
    batches: list[Batch] = field(default_factory=list)
    engine: list[dict[str, Any]] = field(default_factory=list)


def allocate(sizing: WorkerSizing, ranks: Ranks | None = None) -> Allocation:
    """Allocate everything, or nothing: if it fails on one rank it fails on all.

    On the CPU backend attention buffers are NumPy arrays. On a GPU they are the engine's, and
    `Allocation.engine` stays empty.
    """
    return on_every_rank(SingleRank() if ranks is None else ranks, lambda: _allocate(sizing))


def _allocate(sizing: WorkerSizing) -> Allocation:
    device, workload = sizing.device, sizing.device.workload
    if device.storage is None:
        raise InvalidState("[allocate] the sizing has no pools; it did not fit")
    if sizing.manager is None:
        allocation = Allocation(Storage(device.storage))
    else:
        manager = KvCacheManager(sizing.manager)
        allocation = Allocation(manager.storage, manager)
        allocation.batches = [
            manager.create_batch(device.batch, workload.max_units)
            for _ in range(workload.num_batches)
        ]
    if workload.device == "cpu":
        import numpy as np  # not for those who only plan

        allocation.engine = [
            {
                spec.name: np.zeros((*spec.shape, spec.item_bytes), np.uint8)
                for spec in device.engine
            }
            for _ in range(workload.num_batches)
        ]
    return allocation


def measure(allocation: Allocation) -> dict[str, int]:
    """Bytes that are really there, by the parts of a sizing, with "pools" and "host history"."""
    storage, manager = allocation.storage, allocation.manager
    parts = {"pools": storage.get_num_bytes(GPU_LEVEL)}
    if manager is not None:
        use = manager.memory_use()
        parts["arena"] = use.arena_bytes
        parts["entries"] = use.metadata_bytes
        parts["host history"] = use.host_bytes
        parts["host cache"] = use.cold_bytes
        parts["batch buffers"] = sum(
            batch.memory_use().device_bytes for batch in allocation.batches
        )
    elif len(storage.config.cache_tiers) > HOST_LEVEL:
        parts["host cache"] = storage.get_num_bytes(HOST_LEVEL)
    if allocation.engine:
        parts["attention buffers"] = sum(
            array.nbytes for arrays in allocation.engine for array in arrays.values()
        )
    return parts
