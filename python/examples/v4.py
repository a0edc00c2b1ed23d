"""A stock DeepSeek-V4 on a cache manager: same tokens, ratio-4 history in host memory.

Builds a tiny random DeepSeek-V4 and decodes requests of different lengths, which come one after
the other, in steps of one `DeepseekV4CacheManager`; one of them is suspended on the way. Then it
decodes each of them under transformers' own cache, and compares every token. Exits 1 if one
differs. With `--resident` everything stays on the device.
"""

from __future__ import annotations

import sys
import time

import torch
import transformers
from glm5 import console, options
from rich.progress import Progress
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache, PreTrainedModel

from sparse_kvcm.deepseek_v4 import DeepseekV4CacheConfig, DeepseekV4CacheManager, OffloadSizes
from sparse_kvcm.integrations.transformers._arguments import cache_argument
from sparse_kvcm.integrations.transformers.deepseek_v4 import V4Request, V4StepDriver
from sparse_kvcm.models import DeepSeekV4Geometry, geometry_of

PROMPT_LENGTHS = (701, 610, 523, 254)
VOCABULARY = 1024
TOP_K = 24
CACHED_SLOTS = 64  # entries of 4 tokens
UNIT_BYTES = 2 * 64  # BF16 elements of a head
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 32,
    "partial_rotary_factor": 16 / 64,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 2048,
    "sliding_window": 128,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": TOP_K,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
    "initializer_range": 0.2,  # large enough that the tokens vary
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(device: str) -> PreTrainedModel:
    """Make the model in BF16, as its entries are kept."""
    torch.manual_seed(0)
    made = DeepseekV4ForCausalLM._from_config(
        DeepseekV4Config(**SIZES), attn_implementation="eager"
    )
    return made.eval().to(device, torch.bfloat16)


def make_manager(model: PreTrainedModel, max_length: int, resident: bool) -> DeepseekV4CacheManager:
    """Make a manager: everything on the device, or entries of ratio 4 on the host."""
    geometry = geometry_of(model.config.to_dict(), "demo")
    assert isinstance(geometry, DeepSeekV4Geometry)
    pages = -(-max_length // 128)
    sizes = OffloadSizes(CACHED_SLOTS, host_pages=len(PROMPT_LENGTHS) * pages, cold_quota=16 << 20)
    return DeepseekV4CacheManager(
        DeepseekV4CacheConfig(
            geometry,
            max_batch_size=len(PROMPT_LENGTHS),
            max_seq_len=max_length,
            gpu_quota=64 << 20,
            index_dtype="bf16",
            max_util_for_resume=1.0,
            device=str(model.device),
            offload=None if resident else sizes,
        )
    )


def prompt(length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))


def stock_tokens(model: PreTrainedModel, length: int, new_tokens: int) -> list[int]:
    """Decode one request under transformers' own cache."""
    out = model.generate(
        prompt(length)[None].to(model.device),
        attention_mask=torch.ones(1, length, dtype=torch.int64, device=model.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        **{cache_argument(model): DynamicCache(config=model.config)},
    )
    tokens: list[int] = out[0, length:].tolist()
    return tokens


def decode(driver: V4StepDriver, new_tokens: int, progress: Progress) -> list[V4Request]:
    """Decode all requests: they come one after the other, and the second rests for a while."""
    task = progress.add_task("managed", total=len(PROMPT_LENGTHS) * new_tokens)
    requests = []
    for length in PROMPT_LENGTHS:
        requests.append(driver.add(prompt(length), new_tokens))
        progress.advance(task)
        progress.advance(task, len(driver.step()))
    resting = requests[1] if requests[1] in driver.requests else None
    if resting is not None:
        driver.suspend(resting)
    for _ in range(new_tokens // 4):
        progress.advance(task, len(driver.step()))
    if resting is not None:
        driver.resume(resting)
    while driver.requests:
        progress.advance(task, len(driver.step()))
    return requests


def fetched(requests: list[V4Request], layers: int) -> str:
    """Say how often a selected entry was in the lease already."""
    hits = sum(one.hits for one in requests)
    misses = sum(one.misses for one in requests)
    rate = hits / max(1, hits + misses)
    return (
        f"{hits:,} hits, {misses:,} misses in {layers} layers: {rate:.1%}, "
        f"{misses * UNIT_BYTES / 1024:,.0f} KiB fetched"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run both and compare; the exit status."""
    new_tokens, device, resident = options(arguments, "DeepSeek-V4 on a cache manager", 60)
    kept = "all on the device" if resident else f"leases of {CACHED_SLOTS} + 32 entries"
    console.print(
        f"transformers {transformers.__version__}: tiny random DeepSeek-V4, requests of "
        f"{', '.join(map(str, PROMPT_LENGTHS))} tokens, top-k {TOP_K}, {kept}, on {device}"
    )
    begin = time.perf_counter()
    model = build(device)
    manager = make_manager(model, max(PROMPT_LENGTHS) + new_tokens, resident)
    with Progress(console=console) as progress:
        with V4StepDriver(model, manager) as driver:
            requests = decode(driver, new_tokens, progress)
        task = progress.add_task("stock cache", total=len(PROMPT_LENGTHS))
        faults = []
        for one, length in zip(requests, PROMPT_LENGTHS, strict=True):
            if one.tokens != stock_tokens(model, length, new_tokens):
                faults.append(f"the request of {length} tokens decoded others")
            progress.advance(task)
    if not resident:
        console.print(fetched(requests, len(manager.config.geometry.groups)))
        if not any(one.misses for one in requests):
            faults.append("histories fit their leases")
    console.print(f"{time.perf_counter() - begin:.1f} s")
    for fault in faults:
        console.print(fault)
    if faults:
        return 1
    console.print(f"tokens identical: {len(requests)} requests x {new_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
