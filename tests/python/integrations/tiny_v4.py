"""A tiny random DeepSeek-V4 in BF16, managers for it, and what the stock model decodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from sparse_kvcm.deepseek_v4 import DeepseekV4CacheConfig, DeepseekV4CacheManager, OffloadSizes
from sparse_kvcm.models import DeepSeekV4Geometry, geometry_of
from tiny_glm import cache_argument

torch.set_num_threads(1)
VOCABULARY, TOP_K, WINDOW, MOST = 256, 16, 40, 700


@cache
def model() -> Any:
    """Four layers: window, ratio 4, ratio 128, ratio 4. The same weights each time."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        q_lora_rank=32,
        partial_rotary_factor=16 / 64,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=TOP_K,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    made = DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")
    # Biases and norms of compressors begin as zeros and ones, which would hide their loss.
    for name, parameter in made.named_parameters():
        if "position_bias" in name or "kv_norm" in name or "sinks" in name:
            parameter.data += 0.5 * torch.randn(parameter.shape)
    return made.eval().to(torch.bfloat16)


def manager(offload: bool, **changes: Any) -> DeepseekV4CacheManager:
    """Three rows; leases of one page of entries and a window."""
    geometry = geometry_of(model().config.to_dict())
    assert isinstance(geometry, DeepSeekV4Geometry)
    page = changes.get("tokens_per_block", 128)
    fields: dict[str, Any] = {
        "geometry": geometry,
        "max_batch_size": 3,
        "max_seq_len": MOST,
        "gpu_quota": 8 << 20,
        "index_dtype": "bf16",
        "max_util_for_resume": 1.0,
    }
    if offload:
        fields["offload"] = OffloadSizes(page // 4, host_pages=40, cold_quota=4 << 20)
    return DeepseekV4CacheManager(DeepseekV4CacheConfig(**(fields | changes)))


def prompt(seed: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def kept_in(cache: Any) -> dict[str, Any]:
    """The argument by which the model takes a cache; transformers 5.24 changed its name."""
    return {cache_argument(model()): cache}


@cache
def stock(seed: int, length: int, new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of one request under transformers' own cache, and logits."""
    made = model()
    held = DynamicCache(config=made.config)
    ids, tokens, logits = prompt(seed, length)[None], [], []
    with torch.no_grad():
        for _ in range(new_tokens):
            out = made(input_ids=ids, **kept_in(held), use_cache=True, logits_to_keep=1)
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            ids = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)
