"""What a worker that only decodes warms up and captures, for the engine that runs it.

One flag, ``generation_only``, serves offloading workers and Helix workers: neither sees a prompt.
Such a worker runs no estimation pass, since its sizes are computed and no prefill peak exists, and
it captures no prefill graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.config import WorkerConfig

PREFILL_TOKENS = (1, 64, 512, 2048, 8192)  # of the steps that other workers warm up


@dataclass(frozen=True)
class WarmupShape:
    """One step to run before serving.

    Attributes
    ----------
    num_requests : int
        Rows of the launch.
    new_tokens : int
        Tokens that each request adds.
    history : int
        Tokens that each request has before.
    capture_graph : bool
    """

    num_requests: int
    new_tokens: int
    history: int
    capture_graph: bool


@dataclass(frozen=True)
class WarmupPlan:
    """What a worker does before it serves.

    Attributes
    ----------
    estimates_memory : bool
        Whether to measure a prefill's peak to size the pools.
    shapes : tuple of WarmupShape
        Steps in the order to run them, largest batch first so that later ones reuse its memory.
    """

    estimates_memory: bool
    shapes: tuple[WarmupShape, ...]


def batch_buckets(max_batch_size: int) -> list[int]:
    """Batch sizes that graphs are captured for, ascending: 1, 2, 4, 8, 16, ..., 64, 72, ...

    Steps of 8 rows, or of an eighth where that is more. A step of the engine runs in the smallest
    bucket that holds it, with -1 in the other rows.
    """
    if max_batch_size < 1:
        raise InvalidArgument(f"[batch_buckets] max_batch_size must be >= 1, got {max_batch_size}")
    buckets = [size for size in (1, 2, 4) if size < max_batch_size]
    size = 8
    while size < max_batch_size:
        buckets.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return [*buckets, max_batch_size]


def bucket_for(num_requests: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds a step.

    Raises
    ------
    InvalidArgument
        If there is none.
    """
    for size in buckets:
        if num_requests <= size and num_requests >= 1:
            return size
    raise InvalidArgument(
        f"[bucket_for] num_requests must be in [1, {max(buckets, default=0)}], got {num_requests}"
    )


def plan_warmup(config: WorkerConfig, buckets: Sequence[int] | None = None) -> WarmupPlan:
    """Say what to run before serving. `BaseKvCacheManager.warmup` calls it for its worker.

    Parameters
    ----------
    config : WorkerConfig
    buckets : sequence of int, optional
        Batch sizes of the graphs; `batch_buckets` of max_batch_size without it.
    """
    kv = config.kv_cache_config
    sizes = sorted(set(batch_buckets(kv.max_batch_size) if buckets is None else buckets))
    if not sizes or sizes[0] < 1 or sizes[-1] > kv.max_batch_size:
        raise InvalidArgument(
            f"[plan_warmup] buckets must be in [1, max_batch_size {kv.max_batch_size}], got {sizes}"
        )
    step = 1 + config.max_draft_len
    history = max(0, min(kv.avg_seq_len or kv.max_seq_len, kv.max_seq_len) - step)
    decode = [WarmupShape(size, step, history, True) for size in reversed(sizes)]
    if config.generation_only:
        return WarmupPlan(False, tuple(decode))
    longest = min(kv.max_num_tokens, kv.max_seq_len)
    tokens = sorted({*(n for n in PREFILL_TOKENS if n < longest), longest}, reverse=True)
    return WarmupPlan(True, (*(WarmupShape(1, n, 0, False) for n in tokens), *decode))
