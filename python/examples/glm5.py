"""A stock GLM-5 decodes with its latent KV history in host memory: same tokens, far less device.

Builds a tiny random GLM-5, runs the same prompts through `generate` twice, once with transformers'
own cache and once with an OffloadedCache on a DSA cache manager, and compares every token. Exits 1
at the first difference. The manager is DSACacheManagerV2: its leases are far smaller than the
histories, or with `--resident` it keeps everything on the device. With `--device cuda` model and
leases are on the GPU, the histories in pinned host memory.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from collections.abc import Callable

import torch
import transformers
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import (
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
)

import sparse_kvcm
from sparse_kvcm.dsa import DsaCacheConfig, DSACacheManagerV2, OffloadSizes
from sparse_kvcm.integrations.transformers import IMPLEMENTATION, GroupStatistics, OffloadedCache
from sparse_kvcm.models import DsaGeometry, geometry_of

TOP_K = 24
PAGE = 8
CACHED_SLOTS = 3 * TOP_K
PROMPT_LENGTHS = (700, 610, 520)
VOCABULARY = 1024
HEADINGS = ("group", "layers", "hits", "misses", "hit rate", "fetched", "device", "history")

console = Console(highlight=False)


class Advance(StoppingCriteria):
    """Moves the progress bar after each token; stops nothing."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self.progress = progress
        self.task = progress.add_task(description, total=total)

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object
    ) -> torch.Tensor:
        """Count one token."""
        self.progress.advance(self.task)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


Model = tuple[type[PreTrainedModel], PreTrainedConfig]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 48,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": TOP_K,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # large enough that the tokens vary
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def glm5() -> Model:
    """Five layers in two selection groups."""
    kinds = ["full", "full", "shared", "shared", "shared"]
    return GlmMoeDsaForCausalLM, GlmMoeDsaConfig(indexer_types=kinds, **SIZES)


def build(model: Model, implementation: str, device: str) -> PreTrainedModel:
    """Make a model in BF16, as its latents are kept: the same weights each time."""
    kind, config = model
    torch.manual_seed(0)
    made = kind._from_config(config, attn_implementation=implementation)
    return made.eval().to(device, torch.bfloat16)


def make_manager(
    model: PreTrainedModel, requests: int, max_length: int, resident: bool
) -> DSACacheManagerV2:
    """Make a manager for the model: everything on the device, or latents on the host."""
    geometry = geometry_of(model.config.to_dict(), "demo")
    assert isinstance(geometry, DsaGeometry)
    pages = -(-max_length // PAGE)
    config = DsaCacheConfig(
        geometry,
        max_batch_size=requests,
        max_seq_len=max_length,
        gpu_quota=16 << 20,
        index_dtype="bf16",
        tokens_per_block=PAGE,
        max_util_for_resume=1.0,
        device=str(model.device),
        offload=None if resident else OffloadSizes(CACHED_SLOTS, host_pages=requests * pages),
    )
    return DSACacheManagerV2(config)


def left_padded(lengths: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Make random prompts, padded on the left, and their mask."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return (ids * mask).to(device), mask.long().to(device)


def generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    new_tokens: int,
    progress: Progress,
    description: str,
    cache: OffloadedCache | None = None,
) -> torch.Tensor:
    """Decode greedily; the new tokens, one row per request."""
    options: dict[str, object] = {}
    if cache is not None:
        # transformers 5.24 renamed the argument.
        new_name = "cache" in inspect.signature(model.forward).parameters
        options["cache" if new_name else "past_key_values"] = cache
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=[Advance(progress, description, new_tokens)],
        **options,
    )
    tokens: torch.Tensor = output[:, ids.shape[1] :]
    return tokens


def difference(tokens: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Describe the first token, in order of decoding, that differs."""
    places = (tokens != expected).T.nonzero()
    if not len(places):
        return None
    position, request = places[0].tolist()
    return (
        f"request {request}, token {position}: {int(tokens[request, position])} offloaded, "
        f"{int(expected[request, position])} stock"
    )


def table(statistics: list[GroupStatistics]) -> Table:
    """Lay out the statistics of all selection groups."""
    rows = Table(title="Selection groups; fetched, device and history in KiB", box=SIMPLE)
    for name in HEADINGS:
        rows.add_column(name, justify="right", no_wrap=True)
    for one in statistics:
        rows.add_row(
            str(one.group),
            " ".join(map(str, one.layers)),
            f"{one.hits:,}",
            f"{one.misses:,}",
            f"{one.hit_rate:.1%}",
            f"{one.bytes_fetched / 1024:,.0f}",
            f"{one.device_bytes / 1024:,.0f}",
            f"{one.history_bytes / 1024:,.0f}",
        )
    return rows


def check_run(
    cache: OffloadedCache, num_requests: int, new_tokens: int, resident: bool
) -> str | None:
    """Say what would make the comparison worthless, if anything does."""
    statistics = cache.statistics()
    for one in statistics:
        if one.steps != new_tokens - 1 or one.rows != one.steps * num_requests:
            return f"decode was not batched: {one.rows} rows in {one.steps} steps"
        if not resident and one.device_bytes >= one.history_bytes:
            return f"histories of group {one.group} fit their leases"
    return None


def fault_of(device: str) -> str | None:
    """Say why a device cannot be used, if it cannot."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        return f"--device must be cpu, cuda or cuda:<index>, got {device}"
    if device == "cpu":
        return None
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return f"--device {device} is not there: torch finds {torch.cuda.device_count()} GPUs"
    if not sparse_kvcm.cuda_is_available():
        return f"--device {device} is not there: {sparse_kvcm.cuda_unavailable_reason()}"
    return None


def options(arguments: list[str] | None, what: str, new_tokens: int) -> tuple[int, str, bool]:
    """Read the command line: tokens per request, the device, and whether all is kept on it."""
    parser = argparse.ArgumentParser(description=f"A stock {what}.")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="tokens per request")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:<index>")
    parser.add_argument("--resident", action="store_true", help="keep everything on the device")
    given = parser.parse_args(arguments)
    if given.new_tokens < 1:
        parser.error(f"--new-tokens must be >= 1, got {given.new_tokens}")
    if fault := fault_of(given.device):
        parser.error(fault)
    torch.set_num_threads(1)  # more threads only wait for each other at this size
    return given.new_tokens, given.device, given.resident


def main(
    arguments: list[str] | None = None, name: str = "GLM-5", make: Callable[[], Model] = glm5
) -> int:
    """Run both and compare; the exit status."""
    new_tokens, device, resident = options(arguments, f"{name} on a DSA cache manager", 220)
    ids, mask = left_padded(PROMPT_LENGTHS, device)
    requests, max_length = len(PROMPT_LENGTHS), ids.shape[1] + new_tokens
    kept = "all on the device" if resident else f"leases of {CACHED_SLOTS} + {PAGE} slots"
    console.print(
        f"transformers {transformers.__version__}: tiny random {name}, {requests} requests of "
        f"{', '.join(map(str, PROMPT_LENGTHS))} tokens, top-k {TOP_K}, {kept}, on {device}"
    )
    begin = time.perf_counter()
    with Progress(console=console) as progress:
        stock = build(make(), "eager", device)
        expected = generate(stock, ids, mask, new_tokens, progress, "stock cache")
        model = build(make(), IMPLEMENTATION, device)
        manager = make_manager(model, requests, max_length, resident)
        cache = OffloadedCache(model, max_rows=requests, max_length=max_length, manager=manager)
        tokens = generate(model, ids, mask, new_tokens, progress, type(manager).__name__, cache)
    console.print(table(cache.statistics()))
    console.print(f"{time.perf_counter() - begin:.1f} s")
    fault = difference(tokens, expected) or check_run(cache, requests, new_tokens, resident)
    cache.close()
    if fault:
        console.print(fault)
        return 1
    console.print(f"tokens identical: {requests} requests x {new_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
