"""`generate` with the offloaded cache against `generate` with the stock cache."""

from __future__ import annotations

from tiny_glm import (
    TOP_K,
    assert_same,
    build,
    build_deepseek,
    generate,
    occupancy,
    offloaded,
    prompts,
    stock_result,
    torch,
)

# isort: split
import pytest
from transformers import StoppingCriteria, StoppingCriteriaList

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers import OffloadedCache, manager_config
from sparse_kvcm.integrations.transformers.steps import DecodeSteps

NEW_TOKENS = 40
PAIR = (150, 97)  # prompts of two requests


@pytest.fixture
def model(device):
    return build("sparse_kvcm")


def check(model, lengths, new_tokens=NEW_TOKENS, make=build, **options):
    """Same tokens and logits; returns the cache for more checks."""
    cache = offloaded(model, rows=len(lengths), **options)
    result = generate(model, *prompts(lengths), new_tokens, cache)
    assert_same(*result, *stock_result(tuple(lengths), new_tokens, model.dtype, make))
    for statistics in cache.statistics():
        assert statistics.steps == new_tokens - 1
        assert statistics.rows == (new_tokens - 1) * len(lengths)
    return cache


def test_the_oracle_does_not_repeat_itself():
    for row in stock_result(PAIR, NEW_TOKENS)[0]:
        assert len(set(row.tolist())) > NEW_TOKENS // 2


def exceeds_its_lease(request):
    return request.length > request.lease.cached_slots + request.lease.window_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[150, 150], [150, 97], [150, 60, 91]], ids=str)
def test_logits_bit_equal_for_equal_and_padded_prompts(device, lengths, dtype):
    cache = check(build("sparse_kvcm", dtype), lengths)
    assert all(map(exceeds_its_lease, cache.requests))
    for statistics in cache.statistics():
        assert statistics.misses > 0
        assert statistics.hits > 0
        assert statistics.device_bytes < statistics.history_bytes


def test_logits_bit_equal_for_deepseek_v32(device):
    check(build_deepseek("sparse_kvcm"), [150, 97], make=build_deepseek)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, TOP_K - 1, TOP_K, TOP_K + 1])
def test_logits_bit_equal_for_prompts_around_window_and_top_k(model, length):
    check(model, [length, 120])


def test_logits_bit_equal_when_all_prompts_are_shorter_than_the_window(model):
    check(model, [3, 5], new_tokens=80)


def test_logits_bit_equal_with_as_many_cached_slots_as_selected_units(model):
    cache = check(model, [150, 97], cached_slots=TOP_K)
    assert all(request.lease.cached_slots == TOP_K for request in cache.requests)


def test_logits_bit_equal_with_leases_that_are_all_window(model):
    cache = check(model, [20, 9], max_length=64, cached_slots=64)
    assert all(request.lease.cached_slots == 0 for request in cache.requests)
    assert all(statistics.misses == 0 for statistics in cache.statistics())


def test_logits_bit_equal_when_all_window_and_cached_leases_mix(model):
    cache = check(model, [150, 14], max_length=190, cached_slots=48)
    assert {request.lease.cached_slots for request in cache.requests} == {0, 48}


@pytest.mark.parametrize("window_pages", [1, 3])
def test_logits_bit_equal_for_windows_of_several_pages(model, window_pages):
    config = manager_config(
        model,
        max_rows=2,
        max_length=256,
        cached_slots=24,
        window_slots=8 * window_pages,
        tokens_per_block=8,
    )
    check(model, [100, 60], max_length=256, manager=kvcm.KvCacheManager(config))


def test_compact_form_gives_the_same_tokens(model):
    lengths = (150, 9, 97)
    cache = offloaded(model, rows=3, form="compact")
    tokens, logits = generate(model, *prompts(lengths), NEW_TOKENS, cache)
    expected_tokens, expected_logits = stock_result(lengths, NEW_TOKENS)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)


def test_finished_rows_go_on_with_padding(model):
    expected, _ = stock_result(PAIR, NEW_TOKENS)
    options = {"eos_token_id": int(expected[0, 10]), "pad_token_id": 0}
    result = generate(model, *prompts(PAIR), NEW_TOKENS, offloaded(model), **options)
    assert_same(*result, *stock_result(PAIR, NEW_TOKENS, **options))
    assert (result[0][0, 11:] == 0).all()


def test_a_cache_goes_on_where_generate_stopped(model, device):
    """The second prompt is longer than any of the stock run: on a GPU other kernels multiply it."""
    ids, mask = prompts(PAIR)
    cache = offloaded(model)
    first, first_logits = generate(model, ids, mask, 15, cache)
    longer = torch.cat([ids, first], 1)
    longer_mask = torch.cat([mask, torch.ones_like(first)], 1)
    second, second_logits = generate(model, longer, longer_mask, 25, cache)
    tokens, logits = torch.cat([first, second], 1), torch.cat([first_logits, second_logits])
    expected_tokens, expected_logits = stock_result(PAIR, 40)
    if device == "cuda":
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
        logits = expected_logits
    assert_same(tokens, logits, expected_tokens, expected_logits)


def test_a_reset_cache_takes_new_prompts(model):
    cache = offloaded(model)
    fresh = occupancy(cache.manager)
    for seed, lengths in enumerate([(150, 97), (60,), (30, 120)]):
        result = generate(model, *prompts(lengths, seed), NEW_TOKENS, cache)
        assert_same(*result, *stock_result(lengths, NEW_TOKENS, seed=seed))
        cache.reset()
        assert occupancy(cache.manager) == fresh


def test_two_caches_share_a_manager(model):
    config = manager_config(model, max_rows=2, max_length=256, cached_slots=32, tokens_per_block=8)
    manager = kvcm.KvCacheManager(config)
    fresh = occupancy(manager)
    caches = [OffloadedCache(model, max_rows=1, max_length=256, manager=manager) for _ in range(2)]
    for length, cache in zip([150, 110], caches, strict=True):
        result = generate(model, *prompts((length,)), NEW_TOKENS, cache)
        assert_same(*result, *stock_result((length,), NEW_TOKENS))
    for cache in caches:
        cache.close()
    assert occupancy(manager) == fresh


class EachStep(StoppingCriteria):
    """Calls something between the steps of generate."""

    def __init__(self, call):
        self.call, self.step = call, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.call(self.step)
        self.step += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def between_steps(call):
    return {"stopping_criteria": StoppingCriteriaList([EachStep(call)])}


@pytest.mark.parametrize("max_length", [512, 48], ids=["cached", "all_window"])
def test_suspend_and_resume_between_steps_change_nothing(model, max_length):
    lengths = PAIR if max_length == 512 else (12, 7)
    cache = offloaded(model, max_length=max_length, cached_slots=48)

    def call(step):
        if step % 7 == 3:
            cache.suspend()
            assert all(one.state == kvcm.KvCacheState.SUSPENDED for one in cache.requests)
            cache.resume()

    result = generate(model, *prompts(lengths), 36, cache, **between_steps(call))
    assert_same(*result, *stock_result(lengths, 36))


def units(manager, layer, dtype):
    """The arena of a layer as units, [slots, width]."""
    arena = torch.from_dlpack(manager.arena(layer))
    unit_bytes = manager.config.groups[manager.group_of(layer)].layout.unit_bytes
    return arena.view(-1).view(dtype).view(-1, unit_bytes // dtype.itemsize)


def poison_unfetched(cache, dtype=torch.float32):
    """Overwrite every slot that holds no unit of a request, in every layer."""
    manager = cache.manager
    for group, config in enumerate(manager.config.groups):
        stale = torch.ones(len(units(manager, config.layers[0], dtype)), dtype=torch.bool)
        for request in cache.requests:
            base, window = request.lease.base, request.lease.window_slots
            entries = request.decode_entries(group)
            for slot, entry in enumerate(entries):
                stale[base + slot] = entry.empty
            for ordinal in range(request.window_begin, request.length):
                stale[base + request.lease.cached_slots + ordinal % window] = False
        assert stale.any()
        for layer in config.layers:
            units(manager, layer, dtype)[stale] = 1e4


@pytest.mark.parametrize("lengths", [PAIR, (20, 9)], ids=["cached", "all_window"])
def test_poison_in_slots_that_were_not_fetched_changes_nothing(model, lengths):
    cache = offloaded(model, max_length=max(lengths) + NEW_TOKENS, cached_slots=64)
    for layer in cache.manager.layers:
        units(cache.manager, layer, torch.float32).fill_(1e4)
    calls = between_steps(lambda step: poison_unfetched(cache))
    result = generate(model, *prompts(lengths), NEW_TOKENS, cache, **calls)
    assert_same(*result, *stock_result(lengths, NEW_TOKENS))


def test_a_wrong_slot_changes_tokens(model, monkeypatch):
    gather = DecodeSteps.gather
    monkeypatch.setattr(
        DecodeSteps, "gather", lambda self, layer, slots: gather(self, layer, slots ^ 1)
    )
    tokens, _ = generate(model, *prompts(PAIR), NEW_TOKENS, offloaded(model))
    expected, _ = stock_result(PAIR, NEW_TOKENS)
    assert not torch.equal(tokens, expected)


@pytest.mark.parametrize("layer", range(5))
def test_a_wrong_unit_in_one_layer_changes_logits(model, layer, monkeypatch):
    gather = DecodeSteps.gather

    def gather_wrongly(self, index, slots):
        return gather(self, index, slots ^ 1 if index == layer else slots)

    monkeypatch.setattr(DecodeSteps, "gather", gather_wrongly)
    _, logits = generate(model, *prompts(PAIR), 5, offloaded(model))
    _, expected = stock_result(PAIR, 5)
    assert torch.equal(logits[0], expected[0])  # the prompt reads live rows
    assert not torch.equal(logits[1], expected[1])


def test_a_lost_window_write_changes_logits(model, monkeypatch):
    monkeypatch.setattr(DecodeSteps, "write", lambda self, layer, latents: None)
    _, logits = generate(model, *prompts(PAIR), 12, offloaded(model))
    _, expected = stock_result(PAIR, 12)
    assert not torch.equal(logits, expected)
