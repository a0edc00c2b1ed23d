"""Tiny random DSA models, and the stock transformers cache as the oracle.

Importing this module skips the importing tests where transformers is missing or too old, so they
import it before anything else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip(
    "transformers", minversion="5.18", reason="needs transformers >= 5.18"
)

from sparse_kvcm.integrations.transformers import OffloadedCache, greedy  # noqa: E402

torch.set_num_threads(1)  # more threads only wait for each other at this size

_device = "cpu"


@contextlib.contextmanager
def on_device(device):
    """Where `build` puts its models from here on."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


TOP_K = 16
VOCABULARY = 512


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": TOP_K,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large enough that the likeliest token is not always the same
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(implementation, dtype=torch.float32):
    """A random GLM-5: two selection groups, with two followers and with one."""
    return _build_glm(implementation, dtype, _device)


def build_deepseek(implementation, dtype=torch.float32):
    """A random DeepSeek-V3.2: each layer is a selection group."""
    return _build_deepseek(implementation, dtype, _device)


@functools.cache
def _build_glm(implementation, dtype, device):
    kinds = ["full", "shared", "shared", "full", "shared"]
    config = transformers.GlmMoeDsaConfig(num_hidden_layers=5, indexer_types=kinds, **SMALL)
    return _model(transformers.GlmMoeDsaForCausalLM, config, implementation, dtype, device)


@functools.cache
def _build_deepseek(implementation, dtype, device):
    config = transformers.DeepseekV32Config(num_hidden_layers=3, **SMALL)
    return _model(transformers.DeepseekV32ForCausalLM, config, implementation, dtype, device)


def _model(kind, config, implementation, dtype, device):
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation)
    return model.eval().to(device, dtype)


def cache_argument(model):
    """The cache's name in this version: cache from 5.24 on, past_key_values before."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def prompts(lengths, seed=1):
    """Random prompts, padded on the left: ids [b, longest] and the mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids, mask.long()


def generate(model, ids, mask, new_tokens, cache=None, **options):
    """Greedy tokens [b, new] and logits [new, b, vocabulary], on the CPU."""
    if cache is not None:
        options[cache_argument(model)] = cache
    with torch.no_grad():
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return output.sequences[:, ids.shape[1] :].cpu(), torch.stack(output.logits).cpu()


def stock_result(lengths, new_tokens, dtype=torch.float32, make=build, seed=1, **options):
    """What `generate` gives for `prompts(lengths, seed)` with the stock cache."""
    return _stock_result(make("eager", dtype), lengths, new_tokens, seed, **options)


@functools.cache
def _stock_result(model, lengths, new_tokens, seed, **options):
    return generate(model, *prompts(lengths, seed), new_tokens, **options)


def forward(model, ids, mask, cache, **options):
    """One forward with a cache; the logits of the last position, on the CPU."""
    options[cache_argument(model)] = cache
    with torch.no_grad():
        ids, mask = ids.to(model.device), None if mask is None else mask.to(model.device)
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        return output.logits[:, -1].cpu()


def offloaded(model, *, rows=2, max_length=512, cached_slots=32, page=8, **options):
    """A cache with a lease of 32 + 8 slots per request, far below the histories of the tests."""
    if "manager" not in options:
        options |= {"cached_slots": cached_slots, "tokens_per_block": page}
    return OffloadedCache(model, max_rows=rows, max_length=max_length, **options)


def occupancy(manager):
    """What is free, as a tuple that compares."""
    free = manager.occupancy()
    return (
        free.free_host_pages,
        free.free_arena_slots,
        free.largest_free_arena_run,
        free.free_leases,
    )


def assert_same(tokens, logits, expected_tokens, expected_logits):
    """Equal tokens and bit-equal logits; the first difference is named."""
    differences = (tokens != expected_tokens).nonzero()
    if len(differences):
        row, position = differences[0].tolist()
        pytest.fail(
            f"request {row}, token {position}: {tokens[row, position]}, "
            f"expected {expected_tokens[row, position]}"
        )
    assert torch.equal(logits, expected_logits), (logits - expected_logits).abs().max()


class Recorder:
    """A sample function that keeps the logits of each forward."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits, requests):
        self.logits.append(logits.clone())
        return greedy(logits, requests)
