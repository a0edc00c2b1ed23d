"""What an offloading worker cannot do, as one table.

The rules follow from the design: a Batch seats one micro-batch at a time, history is written once,
in order, and by one owner, and prompts come in through import_history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.config.worker import WorkerConfig

MIN_COMPUTE_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class _Gate:
    field: str
    value: Callable[[WorkerConfig], object]
    allowed: Callable[[WorkerConfig], bool]
    bound: str
    why: str
    error: type[Exception] = InvalidArgument


_GATES = (
    _Gate(
        "cache_transceiver_config",
        lambda c: c.cache_transceiver_config,
        lambda c: c.cache_transceiver_config is not None,
        "set",
        "offload needs disaggregated generation, whose prompts come in through a transceiver "
        "(backend in_process counts)",
        NotImplementedError,
    ),
    _Gate(
        "generation_only",
        lambda c: c.generation_only,
        lambda c: c.generation_only,
        "true",
        "an offloading worker takes no prefill and no mixed batches",
    ),
    _Gate(
        "kv_cache_config.use_kv_cache_manager_v2",
        lambda c: c.kv_cache_config.use_kv_cache_manager_v2,
        lambda c: c.kv_cache_config.use_kv_cache_manager_v2 is not False,
        "true or auto",
        "only that manager offloads",
    ),
    _Gate(
        "kv_cache_config.enable_block_reuse",
        lambda c: c.kv_cache_config.enable_block_reuse,
        lambda c: not c.kv_cache_config.enable_block_reuse,
        "false",
        "host history has one owner",
    ),
    _Gate(
        "pipeline_parallel_size",
        lambda c: c.pipeline_parallel_size,
        lambda c: c.pipeline_parallel_size == 1,
        "1",
        "a Batch seats one micro-batch at a time",
    ),
    _Gate(
        "context_parallel.size",
        lambda c: f"{c.context_parallel.size} ({c.context_parallel.kind})",
        lambda c: c.context_parallel.size == 1,
        "1",
        "neither Helix nor STAR parallelism is supported",
    ),
    _Gate(
        "max_draft_len",
        lambda c: c.max_draft_len,
        lambda c: c.max_draft_len == 0,
        "0",
        "speculative decoding would take tokens back",
    ),
    _Gate(
        "max_beam_width",
        lambda c: c.max_beam_width,
        lambda c: c.max_beam_width == 1,
        "1",
        "beams would share a history",
    ),
    _Gate(
        "enable_chunked_context",
        lambda c: c.enable_chunked_context,
        lambda c: not c.enable_chunked_context,
        "false",
        "an offloading worker has no context steps",
    ),
    _Gate(
        "kv_cache_config.enable_kv_pool_rebalance",
        lambda c: c.kv_cache_config.enable_kv_pool_rebalance,
        lambda c: not c.kv_cache_config.enable_kv_pool_rebalance,
        "false",
        "arena and host history do not move",
    ),
    _Gate(
        "kv_cache_config.managed_by_another",
        lambda c: c.kv_cache_config.managed_by_another,
        lambda c: not c.kv_cache_config.managed_by_another,
        "false",
        "history has one owner",
    ),
)


def check_gates(config: WorkerConfig, compute_capability: tuple[int, int] | None = None) -> None:
    """Refuse what an offloading worker cannot do. Does nothing for one that does not offload.

    Parameters
    ----------
    config : WorkerConfig
    compute_capability : tuple of int, optional
        Of the GPU, major and minor; checked first. None on the CPU.

    Raises
    ------
    NotImplementedError
        Without a cache transceiver, or on a GPU that is too old.
    InvalidArgument
        Otherwise, naming the field, what it must be, and why.
    """
    if not config.offloads:
        return
    if compute_capability is not None and compute_capability < MIN_COMPUTE_CAPABILITY:
        least, have = (".".join(map(str, v)) for v in (MIN_COMPUTE_CAPABILITY, compute_capability))
        raise NotImplementedError(
            f"[check_gates] compute capability must be >= {least} for offload, got {have}"
        )
    for gate in _GATES:
        if not gate.allowed(config):
            raise gate.error(
                f"[check_gates] {gate.field} must be {gate.bound} with enable_kv_cache_offload, "
                f"got {gate.value(config)}: {gate.why}"
            )
