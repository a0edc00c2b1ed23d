"""The KV cache of a worker, from its configuration to its memory: what model adapters build on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.config import WorkerConfig, check_gates
from sparse_kvcm.decode_worker import WarmupPlan, plan_warmup
from sparse_kvcm.models import ModelGeometry
from sparse_kvcm.planner import resolve_auto
from sparse_kvcm.sizing import (
    Machine,
    Ranks,
    SingleRank,
    WorkerSizing,
    allocate,
    on_every_rank,
    size_worker,
)

FUNCTION = "BaseKvCacheManager"


class BaseKvCacheManager:
    """Checks what a worker may be, sizes it, and allocates: in this order, on all ranks alike.

    The gates of offload are checked here and nowhere else, before anything is sized or allocated.
    Whatever fails on one rank fails on all of them, and leaves nothing behind. Making one is a
    collective call.

    Parameters
    ----------
    config : WorkerConfig
        The same on every rank, ``local_ranks`` apart.
    geometry : ModelGeometry
    machine : Machine
        What this rank finds. On a GPU it must name the compute capability.
    ranks : Ranks, optional
        Who decides together; this rank alone without it.

    Attributes
    ----------
    config : WorkerConfig
        With a number for a ``gpu_cache_factor`` of ``auto``.
    sizing : WorkerSizing
    allocation : Allocation

    Raises
    ------
    NotImplementedError
        For offload without a cache transceiver, or on a GPU that is too old.
    InvalidArgument
        For any other configuration that cannot be, naming the field and its bound.
    OtherRankError
        If the failure was another rank's.

    Examples
    --------
    >>> from sparse_kvcm.config import WorkerConfig
    >>> from sparse_kvcm.models import geometry_of
    >>> from sparse_kvcm.sizing import Machine
    >>> geometry = geometry_of({
    ...     "model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 512,
    ...     "qk_rope_head_dim": 64, "index_topk": 64, "max_position_embeddings": 4096})
    >>> config = WorkerConfig.from_text('''
    ... sparse_attention_config: {algorithm: dsa, enable_kv_cache_offload: true}
    ... kv_cache_config: {max_batch_size: 3, max_seq_len: 1000}
    ... cache_transceiver_config: {backend: in_process}
    ... generation_only: true
    ... ''')
    >>> worker = BaseKvCacheManager(config, geometry, Machine(device_budget=64_000_000))
    >>> worker.sizing.capacity.batch
    3
    >>> [shape.num_requests for shape in worker.warmup().shapes]
    [3, 2, 1]
    """

    def __init__(
        self,
        config: WorkerConfig,
        geometry: ModelGeometry,
        machine: Machine,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = SingleRank() if ranks is None else ranks
        self.config, self.sizing = size_checked(config, geometry, machine, ranks)
        self.allocation = allocate(self.sizing, ranks)

    def warmup(self, buckets: Sequence[int] | None = None) -> WarmupPlan:
        """What the engine runs and captures before it serves; see `decode_worker.plan_warmup`."""
        return plan_warmup(self.config, buckets)


def size_checked(
    config: WorkerConfig, geometry: ModelGeometry, machine: Machine, ranks: Ranks
) -> tuple[WorkerConfig, WorkerSizing]:
    """Check and size a worker, for an adapter that allocates by itself.

    As `BaseKvCacheManager`, whose ``config`` and ``sizing`` it returns.
    """
    on_every_rank(ranks, lambda: _check(config, machine))
    _check_same(config, ranks)
    config = resolve_auto(config, geometry, machine, ranks=ranks)
    return config, size_worker(config, geometry, machine, ranks)


def _check(config: WorkerConfig, machine: Machine) -> None:
    if config.offloads and machine.device != "cpu" and machine.compute_capability is None:
        raise InvalidArgument(
            f"[{FUNCTION}] machine.compute_capability must be given for offload on "
            f"{machine.device}, got None"
        )
    check_gates(config, machine.compute_capability)


def _check_same(config: WorkerConfig, ranks: Ranks) -> None:
    """Ranks with other configurations would make other collective calls, and wait for ever."""
    text = config.model_dump_json(exclude={"local_ranks"})
    digests = ranks.gather(hashlib.sha256(text.encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise InvalidArgument(
            f"[{FUNCTION}] config must be the same on every rank, local_ranks apart, got another "
            f"one on ranks {others} than on rank 0"
        )
