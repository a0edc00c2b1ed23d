"""How many requests fit, which limit says so, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparse_kvcm._core import MAX_ROWS, MAX_TIER_BYTES, InvalidArgument
from sparse_kvcm.byte_counts import show_bytes
from sparse_kvcm.sizing.checks import check_int
from sparse_kvcm.sizing.device import DeviceSizing, max_batch, size_device
from sparse_kvcm.sizing.host import HostSizing, page_bytes
from sparse_kvcm.sizing.workload import Workload

# In fields of the configuration.
ADVICE = {
    "arena": "lower gpu_cache_factor or raise the device budget",
    "device pools": "raise the device budget, or lower the lengths",
    "host history": "raise host_history_size or the machine's limits, or lower the lengths",
    "max_batch_size": "raise max_batch_size",
}


@dataclass(frozen=True)
class Capacity:
    """The batch that fits, and why no more.

    Attributes
    ----------
    batch : int
        Requests of the usual length.
    limits : dict
        The batch that each limit alone would allow: "arena" (with entries and buffers), "device
        pools", "host history", "max_batch_size". Counted up to one more than the last.
    binding : str
        The limit that binds. Arena and pools share one budget; where that binds, the name is that
        of the larger share of a request. Of limits that are equal the device's comes first, then
        max_batch_size, by which a worker sizes its history.
    """

    batch: int
    limits: dict[str, int]
    binding: str

    def __str__(self) -> str:
        fit = "request fits" if self.batch == 1 else "requests fit"
        return (
            f"{self.batch} {fit}; {self.binding} binds: {ADVICE[self.binding]} "
            f"(alone: {', '.join(f'{name} {batch}' for name, batch in self.limits.items())})"
        )


def find_capacity(
    workload: Workload,
    budget: int,
    *,
    offload: bool,
    host_bytes: int | None = None,
    max_batch_size: int | None = None,
) -> Capacity:
    """Find the largest batch.

    Parameters
    ----------
    workload : Workload
    budget : int
        Device bytes for pools, arena and buffers.
    offload : bool
    host_bytes : int, optional
        For host history; no limit without it.
    max_batch_size : int, optional
        A limit of the operator's.
    """
    most = _search_limit(workload, budget, max_batch_size)
    device = _device_batch(workload, budget, most, offload=offload)
    limits: dict[str, int] = {}
    arena_binds = offload and _arena_is_larger(workload, budget, max(1, device))
    if offload:
        limits["arena"] = device if arena_binds else _seats(workload, budget, most, offload=True)
    limits["device pools"] = _pool_batch(workload, budget, most, offload=offload)
    limits["arena" if arena_binds else "device pools"] = device
    if offload and host_bytes is not None:
        limits["host history"] = _host_batch(workload, host_bytes)
    if max_batch_size is not None:
        limits["max_batch_size"] = max_batch_size
    order = ["arena" if arena_binds else "device pools", "max_batch_size", *limits]
    binding = min(limits, key=lambda limit: (limits[limit], order.index(limit)))
    return Capacity(limits[binding], limits, binding)


def fitting_batch(
    workload: Workload,
    budget: int,
    *,
    host_bytes: int | None = None,
    max_batch_size: int | None = None,
) -> int:
    """The batch of `find_capacity` under offload, without the reasons."""
    most = _search_limit(workload, budget, max_batch_size)
    batch = min(most, _device_batch(workload, budget, most, offload=True))
    batch = batch if max_batch_size is None else min(batch, max_batch_size)
    return batch if host_bytes is None else min(batch, _host_batch(workload, host_bytes))


def check_fits(sizing: DeviceSizing, host: HostSizing | None) -> None:
    """Refuse a sizing that the device cannot hold.

    Raises
    ------
    InvalidArgument
        Naming the largest max_batch_size that can be seated, the limit that binds and the batch
        that fits, or the budget that one request needs.
    """
    if sizing.fits:
        return
    workload, budget, offload = sizing.workload, sizing.budget, sizing.offload
    seats = _seats(workload, budget, sizing.batch, offload=offload)
    if seats == 0:
        raise InvalidArgument(
            f"[size_worker] the device budget must be >= {_least_budget(workload, offload)} B for "
            f"one request of max_seq_len {workload.max_seq_len}, got {budget}; raise "
            f"max_gpu_total_bytes, or lower max_seq_len or gpu_cache_factor"
        )
    host_bytes = None if host is None else host.history_bytes
    capacity = find_capacity(workload, budget, offload=offload, host_bytes=host_bytes)
    parts = ", ".join(f"{part} {show_bytes(size)}" for part, size in sizing.fixed.items())
    raise InvalidArgument(
        f"[size_worker] max_batch_size must be <= {seats} for a device budget of {budget} B, got "
        f"{sizing.batch} ({parts}, pools {show_bytes(sizing.pool_floor)} at least); {capacity}"
    )


def _arena_is_larger(workload: Workload, budget: int, batch: int) -> bool:
    """Whether arena, entries and buffers take more of `batch` requests than the pools."""
    fixed = size_device(workload, budget, batch, offload=True).fixed_bytes
    some = max(budget, 1 << 30) + fixed  # a rest of no granule has no pools to ask
    return fixed >= size_device(workload, some, batch, offload=True).pool_floor


def _search_limit(workload: Workload, budget: int, max_batch_size: int | None) -> int:
    """One more than the operator's limit, so that it alone is seen to bind."""
    check_int("find_capacity", "budget", budget, 1, MAX_TIER_BYTES)
    if max_batch_size is not None:
        check_int("find_capacity", "max_batch_size", max_batch_size, 1, MAX_ROWS)
    most = min(MAX_ROWS, workload.most_leases)
    return most if max_batch_size is None else min(most, max_batch_size + 1)


def _host_batch(workload: Workload, host_bytes: int) -> int:
    pages = host_bytes // page_bytes(workload)
    if pages < workload.pages(workload.max_seq_len):
        return 0
    return pages // workload.pages(workload.usual_seq_len)


def _least_budget(workload: Workload, offload: bool) -> int:
    """Of one request; granules grow with the budget."""
    budget = 1
    while True:
        one = size_device(workload, budget, 1, offload=offload)
        if one.fits:
            return budget
        budget = max(budget + 1, one.fixed_bytes + max(1 << 21, one.pool_floor))


def _device_batch(workload: Workload, budget: int, most: int, *, offload: bool) -> int:
    def needed(sizing: DeviceSizing) -> int:
        return sizing.fixed_bytes + sizing.pool_floor

    def fits(batch: int) -> bool:
        return size_device(workload, budget, batch, offload=offload).fits

    return max_batch(fits, most, _hint(workload, budget, most, needed, offload=offload))


def _seats(workload: Workload, budget: int, most: int, *, offload: bool) -> int:
    """As if the pools had to hold no more than one request."""
    one = workload.decode_step(1, workload.max_seq_len)

    def needed(sizing: DeviceSizing) -> int:
        return sizing.fixed_bytes

    def fits(batch: int) -> bool:
        return size_device(workload, budget, batch, offload=offload, pool_batch=one).fits

    return max_batch(fits, most, _hint(workload, budget, most, needed, offload=offload))


def _pool_batch(workload: Workload, budget: int, most: int, *, offload: bool) -> int:
    """As if arena and buffers cost nothing."""

    def needed(sizing: DeviceSizing) -> int:
        return sizing.pool_floor

    def fits(batch: int) -> bool:
        sizing = size_device(workload, budget, batch, offload=offload)
        free = size_device(workload, budget + sizing.fixed_bytes, batch, offload=offload)
        return free.fits

    return max_batch(fits, most, _hint(workload, budget, most, needed, offload=offload))


def _hint(
    workload: Workload,
    budget: int,
    most: int,
    needed: Callable[[DeviceSizing], int],
    *,
    offload: bool,
) -> int:
    """Where a search begins: what some batch needs tells a batch near the end, and that the end."""
    batch = min(64, most)
    for _ in range(2):
        taken = needed(size_device(workload, budget, batch, offload=offload))
        if taken <= 0:
            break
        batch = min(max(1, budget * batch // taken), most)
    return batch
