"""The device budget: what is not pools leaves it first, then the pools get the rest.

One function, `size_device`, serves the planner, a worker's sizing and the allocation, so that they
cannot differ. Pools are sized by the native StorageLayout; nothing here computes a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sparse_kvcm._core import (
    MAX_ROWS,
    BatchDesc,
    CacheTier,
    CacheTierConfig,
    InvalidArgument,
    KvCacheDesc,
    StorageConfig,
    StorageLayout,
    storage_config,
)
from sparse_kvcm.sizing.buffers import (
    BufferSpec,
    batch_memory,
    engine_buffers,
    manager_memory,
)
from sparse_kvcm.sizing.workload import Workload

GPU_LEVEL = 0
HOST_LEVEL = 1
MAX_FLOOR = 1 << 62  # more than any budget
# Parts that grow with the batch and are no pools, in the order of reports.
FIXED_PARTS = ("arena", "entries", "batch buffers", "attention buffers")


@dataclass(frozen=True)
class DeviceSizing:
    """How a device budget is spent on `batch` requests.

    Attributes
    ----------
    workload : Workload
    offload : bool
    batch : int
        Requests at a time: leases, rows of a Batch, and what the pools must hold.
    budget : int
        Bytes of the device.
    fixed : dict
        Bytes that leave the budget before the pools, by part. Without offload no arena and no
        Batch.
    engine : list of BufferSpec
        The arrays behind "attention buffers", of one Batch.
    storage : StorageConfig
        The pools, with a quota of the rest; None if nothing is left. Under offload the storage of
        the manager, with a page of history.
    """

    workload: Workload
    offload: bool
    batch: int
    budget: int
    fixed: dict[str, int]
    engine: list[BufferSpec]
    storage: StorageConfig | None

    @property
    def fixed_bytes(self) -> int:
        """Arena and buffers together."""
        return sum(self.fixed.values())

    @property
    def pool_quota(self) -> int:
        """What the pools may take: whole granules of the rest."""
        return 0 if self.storage is None else self.storage.cache_tiers[GPU_LEVEL].quota

    @cached_property
    def layout(self) -> StorageLayout | None:
        """The layout of the pools."""
        return None if self.storage is None else StorageLayout(self.storage)

    @property
    def pool_floor(self) -> int:
        """The least that the pools take for this batch; `MAX_FLOOR` if slots lack numbers."""
        if self.layout is None:
            return 0
        try:
            return self.layout.min_quota(GPU_LEVEL)
        except InvalidArgument:
            return MAX_FLOOR

    @property
    def fits(self) -> bool:
        """Whether the budget holds the batch."""
        return self.storage is not None and self.pool_floor <= self.pool_quota

    @property
    def pool_bytes(self) -> int:
        """What the pools will take of their quota."""
        return self._level_bytes(GPU_LEVEL)

    @property
    def host_cache_bytes(self) -> int:
        """What pages of suspended requests will take of the host, without offload."""
        return 0 if self.offload else self._level_bytes(HOST_LEVEL)

    def _level_bytes(self, level: int) -> int:
        if self.storage is None or self.layout is None or level >= self.layout.num_levels:
            return 0
        slots = self.layout.slots_for_quota(level, self.storage.cache_tiers[level].quota)
        return sum(
            self.layout.get_num_bytes(index, slots[index])
            for index, group in enumerate(self.layout.pool_groups)
            if group.level == level
        )

    @property
    def total_bytes(self) -> int:
        """What will be allocated."""
        return self.fixed_bytes + self.pool_bytes


def size_device(
    workload: Workload,
    budget: int,
    batch: int,
    *,
    offload: bool,
    pool_batch: BatchDesc | None = None,
) -> DeviceSizing:
    """Spend `budget` bytes of the device on `batch` requests.

    Parameters
    ----------
    workload : Workload
    budget : int
        Bytes of the device for pools, arena and buffers together.
    batch : int
        Requests at a time.
    offload : bool
        History on the host, with an arena; else all of it in the pools.
    pool_batch : BatchDesc, optional
        What the pools must hold. Without it, `batch` requests of the usual length.
    """
    engine = engine_buffers(workload, _groups(workload, 1, offload), batch, offload=offload)
    copies = workload.num_batches
    fixed = {"attention buffers": copies * sum(spec.num_bytes for spec in engine)}
    if offload:
        manager = manager_memory(workload, batch)
        fixed["arena"] = manager.arena_bytes
        fixed["entries"] = manager.metadata_bytes
        fixed["batch buffers"] = copies * batch_memory(workload, batch).device_bytes
    fixed = {part: fixed[part] for part in FIXED_PARTS if part in fixed}
    quota = _whole_granules(workload, budget - sum(fixed.values()), offload=offload)
    storage = None
    if quota > 0:
        storage = _pool_config(workload, quota, batch, offload=offload, pool_batch=pool_batch)
    return DeviceSizing(workload, offload, batch, budget, fixed, engine, storage)


def max_batch(fits: Callable[[int], bool], limit: int = MAX_ROWS, hint: int = 1) -> int:
    """The largest batch that fits, at most `limit`; 0 if none does.

    `fits` must be monotonic. The search begins at `hint`, and is short if that is near.
    """
    if limit < 1:
        return 0
    low, high = 0, limit + 1  # the largest known to fit, the least known not to
    size = min(max(1, hint), limit)
    step = 1
    if fits(size):
        low = size
        while low + step < high:
            if not fits(low + step):
                high = low + step
                break
            low, step = low + step, 2 * step
    else:
        high = size
        while high - step > low:
            if fits(high - step):
                low = high - step
                break
            high, step = high - step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def pool_tokens(sizing: DeviceSizing) -> int:
    """Tokens that the pools hold, in requests of at most the usual length: quota to tokens.

    The way back is `quota_for_tokens`. The two are no inverses, since both round.
    """
    page = sizing.workload.tokens_per_block
    longest = sizing.workload.usual_seq_len
    most = max(1, sizing.batch * sizing.workload.pages(longest))
    quota = sizing.pool_quota
    return page * max_batch(lambda pages: quota_for_tokens(sizing, pages * page) <= quota, most)


def quota_for_tokens(sizing: DeviceSizing, tokens: int) -> int:
    """The least quota of pools that hold so many tokens, in whole pages: tokens to quota."""
    longest = sizing.workload.usual_seq_len
    pages = sizing.workload.pages(longest)
    whole, rest = divmod(tokens, pages * sizing.workload.tokens_per_block)
    requests = [KvCacheDesc(longest, longest - 1)] * whole
    requests += [KvCacheDesc(rest, rest - 1)] if rest else []
    config = _pool_config(
        sizing.workload,
        max(1, sizing.pool_quota),
        sizing.batch,
        offload=sizing.offload,
        pool_batch=BatchDesc(requests or [KvCacheDesc(0, 0)]),
    )
    return StorageLayout(config).min_quota(GPU_LEVEL)


def _pool_config(
    workload: Workload, quota: int, batch: int, *, offload: bool, pool_batch: BatchDesc | None
) -> StorageConfig:
    """Pools on the device: the manager's under offload, else a storage of their own."""
    constraints = [workload.decode_step(1, workload.max_seq_len)]
    constraints.append(workload.usual_step(batch) if pool_batch is None else pool_batch)
    if offload:
        config = workload.manager_config(batch, gpu_quota=quota, constraints=constraints)
        return storage_config(config)
    tiers = [CacheTierConfig(CacheTier.GPU_MEM, quota)]
    if workload.host_cache_size:
        tiers.append(CacheTierConfig(CacheTier.HOST_MEM, workload.host_cache_size))
    return StorageConfig(
        cache_tiers=tiers,
        layers=workload.pool_layers(offload=False),
        constraints=constraints + workload.prompt_steps(),
        **(workload.storage_fields() | workload.resident_steps(batch)),
    )


@lru_cache(maxsize=64)
def _groups(workload: Workload, quota: int, offload: bool) -> StorageLayout:
    """The layout of pools of some quota, whatever the batch."""
    config = _pool_config(workload, quota, 1, offload=offload, pool_batch=None)
    return StorageLayout(config)


def _whole_granules(workload: Workload, quota: int, *, offload: bool) -> int:
    """Round `quota` down to granules, whose size depends on it, by GiB."""
    while quota > 0:
        same = min(quota, (quota >> 30 << 30) or 1)
        granule = _groups(workload, same, offload).granule_bytes(GPU_LEVEL)
        if quota % granule == 0:
            return quota
        quota -= quota % granule
    return 0
