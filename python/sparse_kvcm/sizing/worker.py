"""From a worker's configuration to what it allocates, decided together by all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparse_kvcm._core import MAX_TIER_BYTES, InvalidArgument, KvCacheManagerConfig
from sparse_kvcm.models import ModelGeometry
from sparse_kvcm.sizing.capacity import Capacity, check_fits, find_capacity
from sparse_kvcm.sizing.checks import check_int, check_positive
from sparse_kvcm.sizing.device import DeviceSizing, pool_tokens, quota_for_tokens, size_device
from sparse_kvcm.sizing.host import HostSizing, check_cache, size_host
from sparse_kvcm.sizing.host_memory import HostMemory, host_memory
from sparse_kvcm.sizing.ranks import Ranks, SingleRank, on_every_rank
from sparse_kvcm.sizing.workload import Workload

if TYPE_CHECKING:
    from sparse_kvcm.config import WorkerConfig


@dataclass(frozen=True)
class Machine:
    """What a rank finds.

    Attributes
    ----------
    device_budget : int
        Free device bytes for the KV cache, at most 2^60; ``max_gpu_total_bytes`` may lower it.
    device : str
    compute_capability : tuple of int, optional
        Of the GPU; None on the CPU.
    host : HostMemory, optional
        Of the whole machine; measured where it is needed without it. The configuration says how
        many ranks share it.
    shares_host_memory : bool
        An integrated GPU: the device budget is no longer there for the host.
    link_gb_s : float
        What a copy from host to device reaches, in 10^9 bytes a second: what a
        ``gpu_cache_factor`` of ``auto`` goes by.
    """

    device_budget: int
    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    host: HostMemory | None = None
    shares_host_memory: bool = False
    link_gb_s: float = 55.0

    def __post_init__(self) -> None:
        check_int("Machine", "device_budget", self.device_budget, 0, MAX_TIER_BYTES)
        check_positive("Machine", "link_gb_s", self.link_gb_s)
        _check_type("device", self.device, str)
        _check_type("host", self.host, HostMemory | None)
        _check_type("shares_host_memory", self.shares_host_memory, bool)
        version = self.compute_capability
        if version is not None and not (
            isinstance(version, tuple)
            and len(version) == 2
            and all(isinstance(part, int) and not isinstance(part, bool) for part in version)
        ):
            raise InvalidArgument(
                f"[Machine] compute_capability must be two integers such as (9, 0), or None, "
                f"got {version!r}"
            )

    def budget(self, config: WorkerConfig) -> int:
        """Device bytes that the configuration lets this rank use."""
        return min(
            self.device_budget, config.kv_cache_config.max_gpu_total_bytes or self.device_budget
        )

    def host_memory(self, config: WorkerConfig) -> HostMemory:
        """What the host has for the ranks, on an integrated GPU besides their device budgets."""
        measured = self.host or host_memory(config.local_ranks)
        memory = replace(measured, local_ranks=config.local_ranks)
        return memory.without(self.budget(config)) if self.shares_host_memory else memory


def _check_type(field: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", str(kind))
        raise InvalidArgument(f"[Machine] {field} must be a {name}, got {value!r}")


@dataclass(frozen=True)
class WorkerSizing:
    """What a rank allocates: the same on all ranks."""

    device: DeviceSizing
    host: HostSizing | None
    capacity: Capacity

    @property
    def manager(self) -> KvCacheManagerConfig | None:
        """The manager that holds all of it; None without offload."""
        device = self.device
        if self.host is None or device.storage is None:
            return None
        return device.workload.manager_config(
            device.batch,
            self.host.pages,
            gpu_quota=device.pool_quota,
            constraints=device.storage.constraints,
        )


def workload_of(config: WorkerConfig, geometry: ModelGeometry, device: str = "cpu") -> Workload:
    """The workload that a configuration describes."""
    kv = config.kv_cache_config
    algorithm = config.sparse_attention_config.algorithm
    if algorithm != geometry.algorithm:
        raise InvalidArgument(
            f"[workload_of] sparse_attention_config.algorithm must be {geometry.algorithm} for "
            f"{geometry.name}, got {algorithm}"
        )
    factor = config.sparse_attention_config.kv_cache_offload_config.gpu_cache_factor
    if factor == "auto":
        raise InvalidArgument(
            "[workload_of] gpu_cache_factor must be a number by now, got auto; "
            "sparse_kvcm.planner.resolve_auto chooses it"
        )
    return Workload(
        geometry,
        kv.max_seq_len,
        kv.dtype,
        kv.index_dtype,
        kv.avg_seq_len,
        kv.tokens_per_block or 0,
        factor,
        kv.max_util_for_resume,
        kv.host_cache_size or 0,
        config.num_batches,
        device,
        # Who decodes only gets prompts computed; others compute them in steps.
        0 if config.offloads or config.generation_only else kv.max_num_tokens,
        0
        if config.cache_transceiver_config is None or not config.offloads
        else config.cache_transceiver_config.staging_slots,
    )


def size_worker(
    config: WorkerConfig,
    geometry: ModelGeometry,
    machine: Machine,
    ranks: Ranks | None = None,
) -> WorkerSizing:
    """Size this rank, and settle on what all ranks can have.

    `BaseKvCacheManager` has checked the gates. A collective call: every rank of `ranks` makes it,
    and if it fails on one it fails on all.

    Raises
    ------
    InvalidArgument
        For a size that cannot be, naming the field and its bound.
    OtherRankError
        If the failure was another rank's.
    """
    ranks = SingleRank() if ranks is None else ranks
    device, host, own = on_every_rank(ranks, lambda: _size_rank(config, geometry, machine))
    tokens, host_pages = ranks.minimum([own, 0 if host is None else host.pages])
    quota = on_every_rank(ranks, lambda: _quota_of(device, own, tokens))
    (quota,) = ranks.minimum([quota])  # granules, too, follow from a rank's quota
    if host is not None:
        host = replace(host, pages=host_pages)
    return on_every_rank(ranks, lambda: _settle(device, host, quota))


def _size_rank(
    config: WorkerConfig, geometry: ModelGeometry, machine: Machine
) -> tuple[DeviceSizing, HostSizing | None, int]:
    """What this rank alone would have, and the tokens that its pools would hold."""
    kv = config.kv_cache_config
    workload = workload_of(config, geometry, machine.device)
    if not config.offloads:
        geometry.check_resident(workload.tokens_per_block, kv.dtype, kv.index_dtype)
    budget = machine.budget(config)
    # The pools hold one request of max_seq_len at least; what they hold of max_batch_size is the
    # scheduler's matter, and the capacity report's.
    one = workload.decode_step(1, workload.max_seq_len)
    device = size_device(
        workload, budget, kv.max_batch_size, offload=config.offloads, pool_batch=one
    )
    host = None
    if config.offloads:
        size = config.sparse_attention_config.kv_cache_offload_config.host_history_size
        memory = machine.host_memory(config)
        host = size_host(workload, kv.max_batch_size, memory, host_history_size=size)
    elif device.host_cache_bytes:
        check_cache(workload, machine.host_memory(config), device.host_cache_bytes)
    check_fits(device, host)
    return device, host, pool_tokens(device)


def _quota_of(device: DeviceSizing, own: int, agreed: int) -> int:
    """The pools' quota for the tokens that all ranks can have."""
    if agreed >= own:
        return device.pool_quota
    # Both maps round, so the way back may give more than there was: the first quota caps it.
    return min(device.pool_quota, max(device.pool_floor, quota_for_tokens(device, agreed)))


def _settle(device: DeviceSizing, host: HostSizing | None, quota: int) -> WorkerSizing:
    """Size again with what all ranks have, so that nothing of this rank's own is left in it."""
    workload = device.workload
    settled = size_device(
        workload,
        device.fixed_bytes + quota,
        device.batch,
        offload=device.offload,
        pool_batch=workload.decode_step(1, workload.max_seq_len),
    )
    return WorkerSizing(settled, host, _capacity(settled, host))


def _capacity(device: DeviceSizing, host: HostSizing | None) -> Capacity:
    return find_capacity(
        device.workload,
        device.budget,
        offload=device.offload,
        host_bytes=None if host is None else host.history_bytes,
        max_batch_size=device.batch,
    )
