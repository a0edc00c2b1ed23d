"""Configuration models: YAML or JSON in and out, unknown keys refused, JSON schemas."""

from __future__ import annotations

from typing import Any

from sparse_kvcm.config._base import Bytes, ConfigModel
from sparse_kvcm.config.attention import (
    DeepSeekSparseAttentionConfig,
    DeepSeekV4SparseAttentionConfig,
    SparseAttentionConfig,
    SparseKvCacheOffloadConfig,
)
from sparse_kvcm.config.gates import MIN_COMPUTE_CAPABILITY, check_gates
from sparse_kvcm.config.worker import (
    CacheTransceiverConfig,
    ContextParallelConfig,
    KvCacheConfig,
    WorkerConfig,
)

__all__ = [
    "MIN_COMPUTE_CAPABILITY",
    "Bytes",
    "CacheTransceiverConfig",
    "ConfigModel",
    "ContextParallelConfig",
    "DeepSeekSparseAttentionConfig",
    "DeepSeekV4SparseAttentionConfig",
    "KvCacheConfig",
    "SparseAttentionConfig",
    "SparseKvCacheOffloadConfig",
    "WorkerConfig",
    "check_gates",
    "json_schema",
]


def json_schema() -> dict[str, Any]:
    """The JSON schema of `WorkerConfig`, all parts included."""
    return WorkerConfig.model_json_schema()
