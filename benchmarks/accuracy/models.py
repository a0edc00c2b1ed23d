"""Checkpoints, and tiny random ones that go through the same code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    PreTrainedModel,
)

from sparse_kvcm.integrations.transformers import IMPLEMENTATION

# The attention that each kind of model runs under.
IMPLEMENTATIONS = {
    "glm_moe_dsa": IMPLEMENTATION,
    "deepseek_v32": IMPLEMENTATION,
    "deepseek_v4": "eager",
}
VOCABULARY = 1024
# Least tokens of a tiny model's prompts, beyond every lease: 128 tokens of DSA, 64 entries of V4.
TINY_TOKENS = {"glm5": 192, "v32": 192, "v4": 320}

# Widths that every kind of record can have.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # large enough that the tokens vary
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DSA: dict[str, Any] = _COMMON | {
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 32,
    "first_k_dense_replace": 1,
}
_V4: dict[str, Any] = _COMMON | {
    "num_hidden_layers": 4,
    "head_dim": 256,
    "partial_rotary_factor": 64 / 256,
    "sliding_window": 40,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_topk": 16,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}


def write_tiny(name: str, folder: Path) -> None:
    """Write a checkpoint of random weights in BF16, the same each time, without a tokenizer.

    Parameters
    ----------
    name : {"glm5", "v32", "v4"}
    folder : Path
    """
    if name == "glm5":
        kinds = ["full", "full", "shared", "shared"]
        config: Any = GlmMoeDsaConfig(num_hidden_layers=4, indexer_types=kinds, **_DSA)
    elif name == "v32":
        config = DeepseekV32Config(num_hidden_layers=3, **_DSA)
    else:
        config = DeepseekV4Config(**_V4)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def load_tiny(name: str, device: str) -> PreTrainedModel:
    """Write a tiny checkpoint and load it, all in BF16.

    Loading keeps norms of a DeepSeek-V4 in FP32, which transformers 5.18 then cannot multiply with
    BF16 weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(name, Path(folder))
        model = load(Path(folder), device)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    return model


def load(folder: Path, device: str) -> PreTrainedModel:
    """Load a checkpoint of this machine.

    Raises
    ------
    OSError
        If there is none.
    ValueError
        If it is of another kind of model.
    """
    kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
    if kind not in IMPLEMENTATIONS:
        raise ValueError(
            f"--checkpoint must be a model of type {', '.join(IMPLEMENTATIONS)}, got {kind}"
        )
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(
        folder, dtype="auto", attn_implementation=IMPLEMENTATIONS[kind], local_files_only=True
    ).to(device)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end an answer; none of them in a tiny model."""
    settings = model.generation_config
    ids = settings.eos_token_id if settings is not None else None
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
