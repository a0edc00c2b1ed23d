"""A forward that fails is undone: the step, the lengths, and the indexer keys."""

from __future__ import annotations

from tiny_glm import (
    Recorder,
    assert_same,
    build,
    generate,
    occupancy,
    offloaded,
    prompts,
    stock_result,
    torch,
)

# isort: split
import functools

import pytest

from sparse_kvcm.integrations.transformers import StepDriver, greedy
from stock_driver import StockDriver
from test_generate import between_steps

NEW_TOKENS = 24
LENGTHS = (100, 60)


class InjectedError(Exception):
    """What the tests throw into a forward."""


class Fault:
    """Fails one submodule of a model, the n-th time it is called."""

    def __init__(self, model, path, call):
        self.left = call
        self.handle = model.get_submodule(path).register_forward_pre_hook(self._hook)

    def _hook(self, module, args):
        self.left -= 1
        if self.left < 0:
            self.handle.remove()
            raise InjectedError


# Where a decode step may fail, by what has happened in it.
STARTED = ["model.rotary_emb", "model.layers.0.self_attn.q_a_proj"]
UNDER_WAY = [
    "model.layers.0.self_attn.kv_b_proj",  # the first latents are in
    "model.layers.0.self_attn.indexer.wq_b",
    "model.layers.0.self_attn.indexer.weights_proj",  # the first indexer keys too
    "model.layers.0.self_attn.o_proj",  # the first group is resolved
    "model.layers.1.self_attn.kv_b_proj",
    "model.layers.2.mlp",
    "model.layers.3.self_attn.indexer.weights_proj",
    "model.layers.4.self_attn.kv_b_proj",
]
COMPUTED = ["model.layers.4.self_attn.o_proj", "model.layers.4.mlp", "model.norm", "lm_head"]


@pytest.fixture(scope="module")
def model():
    return build("sparse_kvcm")


def cached_lengths(cache):
    return [request.length for request in cache.requests]


@pytest.mark.parametrize("path", STARTED + UNDER_WAY)
def test_generate_goes_on_after_a_failed_step(model, path):
    ids, mask = prompts(LENGTHS)
    expected, expected_logits = stock_result(LENGTHS, NEW_TOKENS)
    cache = offloaded(model)
    for done in (1, 5, 13):
        so_far = torch.cat([ids, expected[:, :done]], 1)
        so_far_mask = torch.cat([mask, torch.ones(2, done, dtype=torch.long)], 1)
        if cache.get_seq_length() == 0:
            generate(model, ids, mask, 1, cache)
        while cache.get_seq_length() < 100 + done - 1:
            columns = cache.get_seq_length() + 1
            generate(model, so_far[:, :columns], so_far_mask[:, :columns], 1, cache)
        Fault(model, path, 0)
        with pytest.raises(InjectedError):
            generate(model, so_far, so_far_mask, 1, cache)
        assert cached_lengths(cache) == [100 + done - 1, 60 + done - 1]
        tokens, logits = generate(model, so_far, so_far_mask, 3, cache)
        assert_same(tokens, logits, expected[:, done : done + 3], expected_logits[done : done + 3])


@pytest.mark.parametrize("path", STARTED + UNDER_WAY)
def test_a_failed_prompt_leaves_an_empty_cache(model, path):
    ids, mask = prompts(LENGTHS)
    cache = offloaded(model)
    fresh = occupancy(cache.manager)
    Fault(model, path, 0)
    with pytest.raises(InjectedError):
        generate(model, ids, mask, NEW_TOKENS, cache)
    assert cache.get_seq_length() == 0
    assert all(layer.indexer_keys is None for layer in cache.layers)
    assert occupancy(cache.manager) == fresh
    result = generate(model, ids, mask, NEW_TOKENS, cache)
    assert_same(*result, *stock_result(LENGTHS, NEW_TOKENS))


def test_indexer_keys_are_cut_back_by_the_next_call(model):
    ids, mask = prompts(LENGTHS)
    cache = offloaded(model)
    generate(model, ids, mask, 5, cache)
    ids, mask = prompts([105, 65])
    Fault(model, "model.layers.2.mlp", 0)
    with pytest.raises(InjectedError):
        generate(model, ids, mask, 1, cache)
    assert cache.layers[0].indexer_keys.shape[1] == 105  # the fault left one too many
    assert cache.get_seq_length() == 104
    assert [cache.layers[layer].indexer_keys.shape[1] for layer in (0, 3)] == [104, 104]


def test_suspend_undoes_a_failed_step_first(model):
    ids, mask = prompts(LENGTHS)
    cache = offloaded(model)
    expected, expected_logits = stock_result(LENGTHS, 15)
    first, _ = generate(model, ids, mask, 5, cache)
    ids, mask = torch.cat([ids, first], 1), torch.cat([mask, torch.ones_like(first)], 1)
    Fault(model, "model.layers.3.mlp", 0)
    with pytest.raises(InjectedError):
        generate(model, ids, mask, 1, cache)
    cache.suspend()
    cache.resume()
    tokens, logits = generate(model, ids, mask, 10, cache)
    assert_same(tokens, logits, expected[:, 5:], expected_logits[5:])


def test_a_fault_between_steps_of_generate_costs_nothing(model):
    ids, mask = prompts(LENGTHS)
    cache = offloaded(model)
    seen = []

    def call(step):
        seen.append(step)
        if step == 6:
            raise InjectedError

    with pytest.raises(InjectedError):
        generate(model, ids, mask, NEW_TOKENS, cache, **between_steps(call))
    expected, expected_logits = stock_result(LENGTHS, NEW_TOKENS)
    ids = torch.cat([ids, expected[:, :7]], 1)
    mask = torch.cat([mask, torch.ones_like(expected[:, :7])], 1)
    tokens, logits = generate(model, ids, mask, NEW_TOKENS - 7, cache)
    assert_same(tokens, logits, expected[:, 7:], expected_logits[7:])


def drive(driver, steps, faults=lambda step: None):
    """Two requests; returns their tokens."""
    requests = [driver.add(list(range(1, 1 + length)), steps) for length in (70, 40)]
    step = 0
    while len(requests[0].tokens) < steps:
        fault = faults(step)
        step += 1
        if fault:
            with pytest.raises(InjectedError):
                driver.step()
        else:
            driver.step()
    return [request.tokens for request in requests]


def stock_drive():
    return _stock_drive(build("eager"))


@functools.cache
def _stock_drive(model):
    oracle = StockDriver(model, 2)
    return drive(oracle, 20), oracle.logits


@pytest.mark.parametrize("path", STARTED + UNDER_WAY + COMPUTED)
def test_driver_goes_on_after_failed_steps(device, path):
    model = build("sparse_kvcm")
    recorder = Recorder()
    driver = StepDriver(
        model, max_rows=2, max_length=128, cached_slots=32, tokens_per_block=8, sample=recorder
    )
    expected, expected_logits = stock_drive()
    tokens = drive(
        driver, 20, lambda step: Fault(model, path, 0) if step in (0, 4, 5, 11) else None
    )
    assert tokens == expected
    assert all(map(torch.equal, recorder.logits, expected_logits))


@pytest.mark.parametrize("path", STARTED + UNDER_WAY + COMPUTED)
def test_driver_leaks_nothing_when_a_prompt_fails(model, path):
    driver = StepDriver(model, max_rows=2, max_length=128, cached_slots=32, tokens_per_block=8)
    fresh = occupancy(driver.manager)
    Fault(model, path, 0)
    with pytest.raises(InjectedError):
        driver.add(list(range(1, 60)), 10)
    assert driver.requests == ()
    assert occupancy(driver.manager) == fresh


def test_driver_undoes_a_step_whose_sampling_fails(model):
    fail = []

    def sample(logits, requests):
        if fail:
            fail.clear()
            raise InjectedError
        return greedy(logits, requests)

    driver = StepDriver(
        model, max_rows=2, max_length=128, cached_slots=32, tokens_per_block=8, sample=sample
    )
    tokens = drive(driver, 20, lambda step: fail.append(step) or True if step in (3, 9) else None)
    assert tokens == stock_drive()[0]
