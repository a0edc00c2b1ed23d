"""Configuration of a worker: its KV cache, and what else decides whether it can offload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sparse_kvcm._core import LEAST_UTIL_FOR_RESUME, MAX_PAGE_TOKENS, MAX_ROWS
from sparse_kvcm.config._base import Bytes, ConfigModel
from sparse_kvcm.config.attention import SparseAttentionConfig
from sparse_kvcm.models import IndexDtype, KvDtype


class KvCacheConfig(ConfigModel):
    """Sizes, data types and features of the KV cache."""

    tokens_per_block: int | None = Field(
        None, ge=1, le=MAX_PAGE_TOKENS, description="Page in tokens. None: the model's usual one."
    )
    dtype: KvDtype = Field("bf16", description="Of the units.")
    index_dtype: IndexDtype = Field("fp8", description="Of the indexer's keys.")
    max_batch_size: int = Field(1, ge=1, le=MAX_ROWS, description="Requests at a time.")
    max_seq_len: int = Field(4096, ge=1, description="Tokens of the longest request.")
    avg_seq_len: int | None = Field(None, ge=1, description="Tokens of a usual request.")
    max_num_tokens: int = Field(8192, ge=1, description="Tokens of one step, prefill included.")
    max_gpu_total_bytes: Bytes | None = Field(
        None, description="Device budget of a rank: pools, arena and buffers together."
    )
    host_cache_size: Bytes | None = Field(
        None,
        description="Host bytes of a rank for pages of suspended requests. Without it none, and "
        "the least under offload.",
    )
    max_util_for_resume: float = Field(
        0.97,
        ge=LEAST_UTIL_FOR_RESUME,
        le=1,
        description="The most of a pool that requests may take when one resumes.",
    )
    use_kv_cache_manager_v2: bool | Literal["auto"] = Field(
        "auto",
        description="Version of the manager; sparse_kvcm.dsa.choice has the rules. DeepSeek-V4 has "
        "version 2 alone: false is refused.",
    )
    enable_block_reuse: bool = Field(False, description="Share pages of equal prefixes.")
    enable_kv_pool_rebalance: bool = Field(False, description="Move memory between pools.")
    managed_by_another: bool = Field(
        False, description="Another manager, such as a connector or compressor, owns the pages."
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> KvCacheConfig:
        if self.avg_seq_len is not None and self.avg_seq_len > self.max_seq_len:
            raise ValueError(
                f"avg_seq_len must be <= max_seq_len {self.max_seq_len}, got {self.avg_seq_len}"
            )
        return self


class CacheTransceiverConfig(ConfigModel):
    """Where prompts come from. An import in the same process counts as a transceiver."""

    backend: Literal["nixl", "in_process"] = "nixl"
    staging_slots: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Pages of history, of all layers together, that are on their way at a time; "
        "pinned, out of host_history_size.",
    )
    bounce_bytes: int = Field(
        384 << 20,
        ge=0,
        le=1 << 40,
        description="Of GPU memory, in which small pages from another GPU arrive side by side: a "
        "quarter of what is free at most, and made before the cache is sized. 0: none.",
    )
    silence_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="Seconds that a peer may leave a Ping without an answer. Then its requests "
        "fail; after as many again their pages come back.",
    )


class ContextParallelConfig(ConfigModel):
    """Context parallelism."""

    size: int = Field(1, ge=1)
    kind: Literal["helix", "star"] = "helix"


class WorkerConfig(ConfigModel):
    """One rank of an inference engine, as far as its KV cache is concerned."""

    sparse_attention_config: SparseAttentionConfig
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    cache_transceiver_config: CacheTransceiverConfig | None = None
    generation_only: bool = Field(
        False, description="Decodes only: prompts come in computed. Also Helix workers' flag."
    )
    num_batches: int = Field(
        1, ge=1, le=16, description="Copies of a Batch's buffers: 2 with an overlap scheduler."
    )
    pipeline_parallel_size: int = Field(1, ge=1)
    context_parallel: ContextParallelConfig = ContextParallelConfig()
    max_draft_len: int = Field(0, ge=0, description="Tokens of speculative decoding.")
    max_beam_width: int = Field(1, ge=1)
    enable_chunked_context: bool = False
    local_ranks: int = Field(1, ge=1, description="Ranks that share this machine's memory.")

    @property
    def offloads(self) -> bool:
        """Whether history goes to the host."""
        return self.sparse_attention_config.enable_kv_cache_offload
