"""GLM-5 and DeepSeek-V4 decode with the Triton attention: offloaded tokens equal resident ones.

Tiny random stock models, whose decode attention is `sparse_kvcm.attention`: new latents and entries
go straight to their slots, and every layer reads the selected ones where they lie. Each data type
of records decodes twice, from pools of everything and from leases far smaller than the histories,
while requests of different lengths come and go. All logits must be the same bits; those of BF16
records must be near those of the stock model under its own cache and attention. Exits 1 if they are
not. Without `--device cuda` Triton interprets, which takes minutes.
"""

from __future__ import annotations

import os
import sys

# Triton reads this when it is imported, so before anything that may do so.
if __name__ == "__main__" and not any("cuda" in one for one in sys.argv):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import argparse
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import glm5
import torch
import transformers
import v4
from glm5 import console
from rich.progress import Progress
from rich.table import Table
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from sparse_kvcm.deepseek_v4 import DeepseekV4CacheConfig, DeepseekV4CacheManager
from sparse_kvcm.deepseek_v4 import OffloadSizes as V4OffloadSizes
from sparse_kvcm.dsa import DsaCacheConfig, DSACacheManagerV2, OffloadSizes
from sparse_kvcm.integrations.transformers import IMPLEMENTATION, StepDriver
from sparse_kvcm.integrations.transformers._arguments import cache_argument
from sparse_kvcm.integrations.transformers.deepseek_v4 import IMPLEMENTATION as V4_IMPLEMENTATION
from sparse_kvcm.integrations.transformers.deepseek_v4 import V4StepDriver
from sparse_kvcm.models import geometry_of

PROMPT_LENGTHS = (401, 350, 20, 283, 317)  # one is as short as a lease
ROWS = 3  # requests at a time
PAGE = 64
CALM = {"initializer_range": 0.1}  # at 0.2 rounding alone soon decodes other tokens
TOLERANCE = 0.1  # see stock_agreement: where records are BF16
MIB = 1 << 20


class Glm5:
    """All active requests decode in one forward."""

    name = "GLM-5"
    kinds = ("full", "full", "shared", "shared", "shared")  # two selection groups
    kv_dtypes = ("bf16", "fp8", "fp8_ds_mla")
    lease = f"{PAGE} + {PAGE} tokens"

    def build(self, implementation: str, device: str) -> Any:
        """Widths are such that records of all types can have them."""
        sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
        sizes |= {"num_hidden_layers": len(self.kinds)}
        config = GlmMoeDsaConfig(indexer_types=list(self.kinds), **glm5.SIZES | CALM | sizes)
        return glm5.build((GlmMoeDsaForCausalLM, config), implementation, device)

    def driver(self, device: str, kv_dtype: Any, longest: int, offloads: bool, sample: Any) -> Any:
        """On a manager of its own."""
        model = self.build(IMPLEMENTATION, device)
        sizes = OffloadSizes(PAGE, host_pages=len(PROMPT_LENGTHS) * -(-longest // PAGE))
        config = DsaCacheConfig(
            geometry_of(model.config.to_dict()),
            max_batch_size=ROWS,
            max_seq_len=longest,
            gpu_quota=16 * MIB,
            kv_dtype=kv_dtype,
            index_dtype="bf16",
            tokens_per_block=PAGE,
            max_util_for_resume=1.0,
            device=str(model.device),
            offload=sizes if offloads else None,
        )
        manager = DSACacheManagerV2(config)
        return StepDriver(
            model, max_rows=ROWS, max_length=longest, manager=manager, form="triton", sample=sample
        )

    def misses(self, driver: Any, requests: list[Any]) -> int:
        """Units that were fetched."""
        return sum(one.misses for one in driver.statistics())


class V4:
    """Each request has a forward of its own, in one step of the manager."""

    name = "DeepSeek-V4"
    kinds = tuple(v4.SIZES["layer_types"])  # a window alone, and both ratios twice
    kv_dtypes = ("bf16", "fp8_ds_mla")
    lease = "32 + 32 entries of 4 tokens"

    def build(self, implementation: str, device: str) -> Any:
        """Widths as in GLM-5, and sinks that weigh something."""
        sizes = {"head_dim": 256, "partial_rotary_factor": 64 / 256, "index_head_dim": 64}
        layers: dict[str, Any] = {"layer_types": list(self.kinds)}
        layers["mlp_layer_types"] = ["hash_moe", *["moe"] * (len(self.kinds) - 1)]
        layers["num_hidden_layers"] = len(self.kinds)
        config = DeepseekV4Config(**v4.SIZES | CALM | sizes | layers)
        torch.manual_seed(0)
        model = DeepseekV4ForCausalLM._from_config(config, attn_implementation=implementation)
        for name, one in model.named_parameters():
            if "sinks" in name or "position_bias" in name:
                one.data += 0.5 * torch.randn(one.shape)
        return model.eval().to(device, torch.bfloat16)

    def driver(self, device: str, kv_dtype: Any, longest: int, offloads: bool, sample: Any) -> Any:
        """On a manager of its own."""
        model = self.build(V4_IMPLEMENTATION, device)
        pages = len(PROMPT_LENGTHS) * -(-longest // 128)
        config = DeepseekV4CacheConfig(
            geometry_of(model.config.to_dict()),
            max_batch_size=ROWS,
            max_seq_len=longest,
            gpu_quota=64 * MIB,
            kv_dtype=kv_dtype,
            index_dtype="bf16",
            tokens_per_block=128,
            max_util_for_resume=1.0,
            device=str(model.device),
            offload=V4OffloadSizes(32, host_pages=pages) if offloads else None,
        )
        manager = DeepseekV4CacheManager(config)
        return V4StepDriver(model, manager, form="triton", sample=sample)

    def misses(self, driver: Any, requests: list[Any]) -> int:
        """Entries that were fetched."""
        return sum(one.misses for one in requests)


MODELS: dict[str, Any] = {"glm5": Glm5(), "v4": V4()}


@dataclass
class Run:
    """What one driver decoded: tokens and logits, request by request."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    misses: int = 0
    requests: list[Any] = field(default_factory=list)

    def sample(self, logits: torch.Tensor, requests: Any) -> Any:
        """Greedy, for either driver; keeps logits."""
        rows = logits[None] if logits.ndim == 1 else logits
        for row, one in zip(
            rows, requests if isinstance(requests, list) else [requests], strict=True
        ):
            known = [i for i, other in enumerate(self.requests) if other is one]
            if not known:
                self.requests.append(one)
                self.logits.append([])
            self.logits[known[0] if known else -1].append(row.float().cpu())
        return logits.argmax(-1)


def decode(
    run: Run,
    model: Any,
    device: str,
    kv_dtype: str,
    new_tokens: int,
    offloads: bool,
    progress: Progress,
) -> Run:
    """Decode all requests: they come one after the other, and leave as they end."""
    kind = "offloaded" if offloads else "resident"
    task = progress.add_task(
        f"{model.name} {kv_dtype} {kind}", total=len(PROMPT_LENGTHS) * new_tokens
    )
    waiting = list(PROMPT_LENGTHS)
    longest = max(PROMPT_LENGTHS) + new_tokens
    with model.driver(device, kv_dtype, longest, offloads, run.sample) as driver:
        while waiting or driver.requests:
            if waiting and len(driver.requests) < ROWS:
                driver.add(v4.prompt(waiting.pop(0)), new_tokens)
                progress.advance(task)
            progress.advance(task, len(driver.step()))
        run.tokens = [one.tokens for one in run.requests]
        run.misses = model.misses(driver, run.requests) if offloads else 0
    return run


def difference(offloaded: Run, resident: Run) -> str | None:
    """Say what is not the same bits, if anything is; or why the comparison is worth nothing."""
    for i, length in enumerate(PROMPT_LENGTHS):
        if offloaded.tokens[i] != resident.tokens[i]:
            return f"the request of {length} tokens decoded others offloaded"
        if not torch.equal(torch.stack(offloaded.logits[i]), torch.stack(resident.logits[i])):
            return f"the request of {length} tokens had other logits offloaded"
    return None if offloaded.misses else "histories fit their leases"


def stock_logits(stock: Any, length: int, tokens: list[int]) -> torch.Tensor:
    """Logits of each of a request's tokens under transformers' own cache."""
    cache, found = DynamicCache(config=stock.config), []
    ids = v4.prompt(length)[None].to(stock.device)
    for token in tokens:
        with torch.no_grad():
            logits = stock(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(stock): cache}
            ).logits
        found.append(logits[0, -1].float().cpu())
        ids = ids.new_tensor([[token]])
    return torch.stack(found)


def stock_agreement(stock: Any, run: Run) -> tuple[float, float]:
    """Compare with the stock model, which gets the same tokens.

    Returns
    -------
    float
        Share of tokens that are the stock model's likeliest.
    float
        Median over requests: how far the logits of the first token that decodes are from the stock
        model's, by the length of those. Later ones read what rounding has changed, where a token
        near the edge of a selection, or an expert of a choice, may have changed sides.
    """
    same, distances = [], []
    for length, tokens, logits in zip(PROMPT_LENGTHS, run.tokens, run.logits, strict=True):
        wanted, got = stock_logits(stock, length, tokens), torch.stack(logits)
        same += (wanted.argmax(-1) == got.argmax(-1)).tolist()
        distances.append(float((wanted[1] - got[1]).norm() / wanted[1].norm()))
    return sum(same) / len(same), median(distances)


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Stock models with the Triton attention.")
    parser.add_argument("--new-tokens", type=int, help="tokens per request (4; on a GPU 40)")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:<index>")
    parser.add_argument("--model", choices=MODELS, help="one of them alone")
    given = parser.parse_args(arguments)
    if given.new_tokens is None:
        given.new_tokens = 4 if given.device == "cpu" else 40
    if given.new_tokens < 2:
        parser.error(f"--new-tokens must be >= 2, one of which decodes, got {given.new_tokens}")
    if fault := glm5.fault_of(given.device):
        parser.error(fault)
    torch.set_num_threads(1)  # more threads only wait for each other at this size
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run all and compare; the exit status."""
    given = options(arguments)
    chosen = [MODELS[given.model]] if given.model else list(MODELS.values())
    console.print(
        f"transformers {transformers.__version__}: tiny random models, requests of "
        f"{', '.join(map(str, PROMPT_LENGTHS))} tokens, {ROWS} at a time, Triton attention on "
        f"{given.device}"
    )
    begin, faults, runs = time.perf_counter(), [], 0
    rows = Table("model", "records", "leases", "fetched", "likeliest of stock", "off its logits")
    with Progress(console=console) as progress:
        for model in chosen:
            stock = model.build("eager", given.device)
            for kv_dtype in model.kv_dtypes:
                what = (model, given.device, kv_dtype, given.new_tokens)
                resident = decode(Run(), *what, False, progress)
                offloaded = decode(Run(), *what, True, progress)
                fault = difference(offloaded, resident)
                share, off = stock_agreement(stock, offloaded)
                if not fault and kv_dtype == "bf16" and off > TOLERANCE:
                    fault = f"logits are {off:.1%} off those of the stock model"
                if fault:
                    faults.append(f"{model.name} {kv_dtype}: {fault}")
                rows.add_row(
                    model.name, kv_dtype, model.lease, f"{offloaded.misses:,}", f"{share:.0%}",
                    f"{off:.1%}",
                )  # fmt: skip
                runs += 1
    console.print(rows)
    console.print(f"{time.perf_counter() - begin:.1f} s")
    for fault in faults:
        console.print(fault)
    if faults:
        return 1
    console.print(
        f"tokens identical: {runs} runs x {len(PROMPT_LENGTHS)} requests x {given.new_tokens} "
        "tokens, resident and offloaded, logits bit for bit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
