"""Configuration of sparse attention and of its offload to the host."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sparse_kvcm.config._base import Bytes, ConfigModel


class SparseKvCacheOffloadConfig(ConfigModel):
    """How much memory offload gets on either side."""

    gpu_cache_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Literal["auto"] = Field(
        2.0,
        description="GPU cache of a request in selections: it holds this many times top-k units. "
        "auto: what the planner recommends for the link.",
    )
    host_history_size: Bytes | None = Field(
        None,
        description="Pinned host bytes of a rank for history. None: enough for max_batch_size "
        "requests of avg_seq_len, else max_seq_len, within what may be pinned.",
    )


class DeepSeekSparseAttentionConfig(ConfigModel):
    """DeepSeek-V3.2 and GLM-5.x."""

    algorithm: Literal["dsa"] = "dsa"
    enable_kv_cache_offload: bool = Field(
        False, description="Keep the history that selections choose from on the host."
    )
    kv_cache_offload_config: SparseKvCacheOffloadConfig = SparseKvCacheOffloadConfig()
    use_cute_dsl_paged_mqa_logits: bool = Field(
        True, description="Kernel of the indexer's logits. Offload does not change the default."
    )

    @model_validator(mode="after")
    def _name_the_algorithm(self) -> DeepSeekSparseAttentionConfig:
        self.model_fields_set.add("algorithm")  # it says which class text is read back as
        return self


class DeepSeekV4SparseAttentionConfig(DeepSeekSparseAttentionConfig):
    """DeepSeek-V4."""

    algorithm: Literal["deepseek_v4"] = "deepseek_v4"  # type: ignore[assignment]


SparseAttentionConfig = Annotated[
    DeepSeekSparseAttentionConfig | DeepSeekV4SparseAttentionConfig,
    Field(discriminator="algorithm"),
]
