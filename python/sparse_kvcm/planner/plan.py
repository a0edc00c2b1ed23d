"""Answers "how many requests will this worker hold, and why not more".

Everything that is bytes comes from `sparse_kvcm.sizing`. What is added is time: expected misses
from a locality curve, and a step by the sums and costs of `step_time`, or of `step_ms` with a fetch
that nothing hides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparse_kvcm._core import (
    MAX_CACHED_SLOTS,
    MAX_HOST_PAGES,
    MAX_ROWS,
    MAX_TIER_BYTES,
    host_row,
)
from sparse_kvcm.planner.locality import Locality
from sparse_kvcm.planner.step_time import Step
from sparse_kvcm.sizing.buffers import manager_memory
from sparse_kvcm.sizing.capacity import Capacity, find_capacity, fitting_batch
from sparse_kvcm.sizing.checks import check_int, check_positive
from sparse_kvcm.sizing.device import GPU_LEVEL, size_device
from sparse_kvcm.sizing.host import cold_bytes, page_bytes, staging_bytes
from sparse_kvcm.sizing.workload import Workload

FACTOR_GRID = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
STEP_MS = 25.0  # of a model that only its geometry is known of
# In options of ``sparse-kvcm plan``.
ADVICE = {
    "arena": "lower --gpu-cache-factor or raise --device-budget",
    "device pools": "raise --device-budget, or lower --prompt or --output",
    "host history": "raise --host-memory, or lower --prompt or --output",
    "max_batch_size": "raise --max-batch-size",
}


@dataclass(frozen=True)
class Budgets:
    """What the machine gives one rank.

    Attributes
    ----------
    device_bytes : int
        For pools, arena and buffers.
    host_bytes : int, optional
        Pinned, for history and what is beside it. None: as much as is needed.
    link_gb_s : float
        What a copy from host to device reaches, in 10^9 bytes a second.
    step_ms : float, optional
        A decode step without what offload adds, as measured. None: by the costs of an H200.
    expert_ranks : int
        Ranks that divide the experts among them.
    max_batch_size : int, optional
    """

    device_bytes: int
    host_bytes: int | None = None
    link_gb_s: float = 55.0
    step_ms: float | None = None
    expert_ranks: int = 8
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_int("Budgets", "device_bytes", self.device_bytes, 1, MAX_TIER_BYTES)
        if self.host_bytes is not None:
            check_int("Budgets", "host_bytes", self.host_bytes, 0, MAX_TIER_BYTES)
        if self.max_batch_size is not None:
            check_int("Budgets", "max_batch_size", self.max_batch_size, 1, MAX_ROWS)
        check_positive("Budgets", "link_gb_s", self.link_gb_s)
        check_int("Budgets", "expert_ranks", self.expert_ranks, 1, MAX_ROWS)
        if self.step_ms is not None:
            check_positive("Budgets", "step_ms", self.step_ms)


@dataclass(frozen=True)
class Side:
    """A worker that keeps history in one place.

    Attributes
    ----------
    max_batch : int
        Requests at a time.
    binding_limit, advice : str
        Why not more, and which option to change.
    limits : dict
        The batch that each limit alone would allow.
    bytes_per_request : dict
        Device bytes by part, at that batch.
    step_ms : dict
        Predicted milliseconds of a step by part, at that batch.
    """

    max_batch: int
    binding_limit: str
    advice: str
    limits: dict[str, int]
    bytes_per_request: dict[str, int]
    step_ms: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return _tokens_per_s(self.max_batch, self.step_ms)


@dataclass(frozen=True)
class OffloadSide(Side):
    """An offloading worker.

    Attributes
    ----------
    gpu_cache_factor : float
    row_bytes : int
        A lease with its entries: what a request costs however long it is.
    host_bytes_per_request : int
    misses_per_step : float
        Units of one request and selection group.
    fetch_bytes_per_step : int
        Of the whole batch, all layers.
    """

    gpu_cache_factor: float
    row_bytes: int
    host_bytes_per_request: int
    misses_per_step: float
    fetch_bytes_per_step: int


@dataclass(frozen=True)
class FactorPoint:
    """An offloading worker at one gpu_cache_factor."""

    gpu_cache_factor: float
    max_batch: int
    tokens_per_s: float


@dataclass(frozen=True)
class Plan:
    """Both sides, and the cache that suits the link."""

    workload: Workload
    budgets: Budgets
    locality: Locality
    resident: Side
    offload: OffloadSide
    recommended_gpu_cache_factor: float

    @property
    def warnings(self) -> list[str]:
        """What the plan leaves out of account, a sentence each."""
        geometry, length = self.workload.geometry, self.workload.max_seq_len
        found = []
        if length > geometry.max_seq_len:
            found.append(
                f"{geometry.name} takes sequences of {geometry.max_seq_len} tokens, not {length}."
            )
        if geometry.compute is None and self.budgets.step_ms is None:
            found.append(
                f"What a step of {geometry.name} takes is not known; {STEP_MS:g} ms are taken."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """What ``sparse-kvcm plan --json`` writes."""
        workload = self.workload
        return {
            "model": workload.geometry.name,
            "kv_dtype": workload.kv_dtype,
            "index_dtype": workload.index_dtype,
            "tokens_per_block": workload.tokens_per_block,
            "seq_len": workload.usual_seq_len,
            "budgets": asdict(self.budgets),
            "locality": asdict(self.locality),
            "resident": asdict(self.resident) | {"tokens_per_s": self.resident.tokens_per_s},
            "offload": asdict(self.offload) | {"tokens_per_s": self.offload.tokens_per_s},
            "recommended_gpu_cache_factor": self.recommended_gpu_cache_factor,
            "warnings": self.warnings,
        }


def make_plan(
    workload: Workload, budgets: Budgets, locality: Locality, *, auto_factor: bool = False
) -> Plan:
    """Plan a decode worker, resident and offloading.

    Parameters
    ----------
    workload : Workload
    budgets : Budgets
    locality : Locality
    auto_factor : bool
        Plan with the recommended gpu_cache_factor instead of the workload's.
    """
    factor = recommend_factor(workload, budgets, locality)
    if auto_factor:
        workload = replace(workload, gpu_cache_factor=factor)
    return Plan(
        workload,
        budgets,
        locality,
        plan_resident(workload, budgets),
        plan_offload(workload, budgets, locality),
        factor,
    )


def plan_resident(workload: Workload, budgets: Budgets) -> Side:
    """All history on the GPU."""
    capacity = find_capacity(
        workload, budgets.device_bytes, offload=False, max_batch_size=budgets.max_batch_size
    )
    return Side(
        *_side(capacity),
        _bytes_per_request(workload, budgets, capacity, offload=False),
        _step_ms(workload, budgets, capacity.batch),
    )


def plan_offload(workload: Workload, budgets: Budgets, locality: Locality) -> OffloadSide:
    """History on the host."""
    capacity = find_capacity(
        workload,
        budgets.device_bytes,
        offload=True,
        host_bytes=_history_bytes(workload, budgets),
        max_batch_size=budgets.max_batch_size,
    )
    misses = _misses(workload, locality)
    return OffloadSide(
        *_side(capacity),
        _bytes_per_request(workload, budgets, capacity, offload=True),
        _step_ms(workload, budgets, capacity.batch, misses),
        workload.gpu_cache_factor,
        lease_bytes(workload),
        workload.pages(workload.usual_seq_len) * page_bytes(workload),
        misses,
        int(capacity.batch * misses * sum(_row_bytes(workload))),
    )


def lease_bytes(workload: Workload) -> int:
    """Device bytes of a lease: slots of all member layers, entries, a clock per group."""
    one, two = (manager_memory(workload, batch) for batch in (1, 2))
    arena = two.arena_bytes - one.arena_bytes  # without the trash page, which all share
    return arena + two.metadata_bytes - one.metadata_bytes


def recommend_factor(workload: Workload, budgets: Budgets, locality: Locality) -> float:
    """The gpu_cache_factor from `FACTOR_GRID` with the most predicted tokens a second.

    With a max_batch_size it is one with which so many can be seated, if there is any.
    """
    points = sweep_factors(workload, budgets, locality)
    seated = [point for point in points if _seats(workload, budgets, point.gpu_cache_factor)]
    return max(seated or points, key=lambda point: point.tokens_per_s).gpu_cache_factor


def _seats(workload: Workload, budgets: Budgets, factor: float) -> bool:
    """Whether an offloading worker has leases for max_batch_size requests, whatever they are."""
    changed = replace(workload, gpu_cache_factor=factor)
    batch = budgets.max_batch_size or 1
    if batch > min(changed.most_leases, MAX_ROWS):
        return False
    one = changed.decode_step(1, changed.max_seq_len)
    return size_device(changed, budgets.device_bytes, batch, offload=True, pool_batch=one).fits


def sweep_factors(workload: Workload, budgets: Budgets, locality: Locality) -> list[FactorPoint]:
    """An offloading worker at each factor of `FACTOR_GRID` that a lease can have."""
    points = []
    for factor in FACTOR_GRID:
        if factor * workload.geometry.top_k > MAX_CACHED_SLOTS - workload.units_per_page:
            break
        changed = replace(workload, gpu_cache_factor=factor)
        batch = fitting_batch(
            changed,
            budgets.device_bytes,
            host_bytes=_history_bytes(workload, budgets),
            max_batch_size=budgets.max_batch_size,
        )
        step_ms = _step_ms(changed, budgets, batch, _misses(changed, locality))
        points.append(FactorPoint(factor, batch, _tokens_per_s(batch, step_ms)))
    return points


def _history_bytes(workload: Workload, budgets: Budgets) -> int | None:
    """What is left of the host bytes without staging and suspended requests' pages."""
    if budgets.host_bytes is None:
        return None
    page = page_bytes(workload)
    pages = min(MAX_HOST_PAGES, max(1, budgets.host_bytes // page))  # the host holds no more
    rows = max(1, pages // workload.pages(workload.usual_seq_len))
    rows = min(rows, budgets.max_batch_size or rows, workload.most_leases, MAX_ROWS)
    staging = staging_bytes(workload, rows)
    return max(0, budgets.host_bytes - staging - cold_bytes(workload, pages))


def _step_ms(
    workload: Workload, budgets: Budgets, batch: int, misses: float | None = None
) -> dict[str, float]:
    """A step by part; under offload with so many misses of a request and selection group."""
    if batch == 0:
        return {}
    geometry = workload.geometry
    known = geometry.compute is not None and budgets.step_ms is None
    step = Step(
        geometry if known else replace(geometry, compute=None),
        batch,
        workload.usual_seq_len,
        budgets.expert_ranks,
        misses or 0.0,
        () if misses is None else _row_bytes(workload),
        budgets.link_gb_s,
    )
    return ({} if known else {"model": budgets.step_ms or STEP_MS}) | step.parts_ms()


def _tokens_per_s(batch: int, step_ms: dict[str, float]) -> float:
    return 1000 * batch / sum(step_ms.values()) if step_ms else 0.0


def _side(capacity: Capacity) -> tuple[int, str, str, dict[str, int]]:
    return capacity.batch, capacity.binding, ADVICE[capacity.binding], capacity.limits


def _bytes_per_request(
    workload: Workload, budgets: Budgets, capacity: Capacity, *, offload: bool
) -> dict[str, int]:
    """By part: the fixed ones, then the storage layers' slots in one request by role.

    The pools' room above max_util_for_resume, and what rounding to granules takes, is "headroom".
    """
    batch = max(1, capacity.batch)
    sizing = size_device(workload, budgets.device_bytes, batch, offload=offload)
    parts = {part: size // batch for part, size in sizing.fixed.items()}
    layout = sizing.layout
    if layout is None:
        return parts
    request = workload.decode_step(1, workload.sampled_length(workload.usual_seq_len))
    slots = layout.count_slots(request)
    pools = 0
    for index, group in enumerate(layout.pool_groups):
        if group.level == GPU_LEVEL:
            pools += slots[index] * sum(group.slot_bytes)
    parts["pages"] = pools
    parts["headroom"] = sizing.pool_floor // batch - pools
    return parts


def _misses(workload: Workload, locality: Locality) -> float:
    """Expected misses of one request in one selection group and step."""
    units = math.ceil(workload.usual_seq_len / workload.geometry.tokens_per_unit)
    if units <= workload.cached_slots + workload.window_slots:
        return 0.0  # the lease is all window
    top_k = workload.geometry.top_k
    return top_k * locality.miss_share(workload.cached_slots / top_k, units / top_k)


def _row_bytes(workload: Workload) -> tuple[int, ...]:
    """Bytes of a host row by selection group."""
    layout = workload.geometry.unit_layout(workload.kv_dtype)
    return tuple(host_row(layout, len(group)).unit_bytes for group in workload.geometry.groups)
