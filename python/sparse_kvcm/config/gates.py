"""What an offloading worker cannot do, as one table.

The rules follow from the design: a Batch seats one micro-batch at a time, history is written once,
in order, and by one owner, and prompts come in through import_history.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.config.worker import WorkerConfig

MIN_COMPUTE_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class _Gate:
    field: str
    allowed: tuple[object, ...]
    why: str


_GATES = (
    _Gate("generation_only", (True,), "an offloading worker takes no prefill and no mixed batches"),
    _Gate(
        "kv_cache_config.use_kv_cache_manager_v2",
        (True, "auto"),
        "only that manager offloads",
    ),
    _Gate("kv_cache_config.enable_block_reuse", (False,), "host history has one owner"),
    _Gate("pipeline_parallel_size", (1,), "a Batch seats one micro-batch at a time"),
    _Gate("context_parallel.size", (1,), "neither Helix nor STAR parallelism is supported"),
    _Gate("max_draft_len", (0,), "speculative decoding would take tokens back"),
    _Gate("max_beam_width", (1,), "beams would share a history"),
    _Gate("enable_chunked_context", (False,), "an offloading worker has no context steps"),
    _Gate(
        "kv_cache_config.enable_kv_pool_rebalance",
        (False,),
        "arena and host history do not move",
    ),
    _Gate("kv_cache_config.managed_by_another", (False,), "history has one owner"),
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
    if config.cache_transceiver_config is None:
        raise NotImplementedError(
            "[check_gates] cache_transceiver_config must be set with enable_kv_cache_offload, got "
            "none: offload needs disaggregated generation, whose prompts come in through a "
            "transceiver (backend in_process counts)"
        )
    for gate in _GATES:
        value = attrgetter(gate.field)(config)
        if value not in gate.allowed:
            bound = " or ".join(map(_in_yaml, gate.allowed))
            raise InvalidArgument(
                f"[check_gates] {gate.field} must be {bound} with enable_kv_cache_offload, "
                f"got {_in_yaml(value)}: {gate.why}"
            )


def _in_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
