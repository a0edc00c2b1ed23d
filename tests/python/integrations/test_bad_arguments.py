"""Bad arguments are refused by function, name, limit and value, and cost no request anything."""

from __future__ import annotations

from tiny_glm import VOCABULARY, build, generate, occupancy, offloaded, prompts, torch

# isort: split
import re

import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers import (
    OffloadedCache,
    RequestState,
    StepDriver,
    greedy,
    manager_config,
)

SIZES = {"max_rows": 2, "max_length": 64}
LEASE = {"cached_slots": 32, "tokens_per_block": 8}
MAKERS = {"StepDriver": StepDriver, "OffloadedCache": OffloadedCache}


@pytest.fixture(scope="module")
def model():
    return build("sparse_kvcm")


def make_driver(model, **options):
    return StepDriver(model, **SIZES, **LEASE, **options)


def refuses(message):
    return pytest.raises(ValueError, match=re.escape(message))


@pytest.mark.parametrize(
    "name",
    [
        "max_rows",
        "max_length",
        "max_requests",
        "cached_slots",
        "window_slots",
        "arena_pages",
        "tokens_per_block",
    ],
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, ">= 1, got 0"),
        (-8, ">= 1, got -8"),
        (True, "an int, got bool True"),
        (8.0, "an int, got float 8.0"),
        ("8", "an int, got str 8"),
    ],
)
def test_manager_config_refuses_a_size_by_its_own_name(model, name, value, message):
    with refuses(f"[manager_config] {name} must be {message}"):
        manager_config(model, **SIZES | {name: value})


@pytest.mark.parametrize("function", MAKERS)
def test_makers_refuse_sizes_by_name(model, function):
    for name, prefix in [
        ("max_rows", function),
        ("max_length", function),
        ("cached_slots", "manager_config"),
        ("tokens_per_block", "manager_config"),
    ]:
        with refuses(f"[{prefix}] {name} must be >= 1, got 0"):
            MAKERS[function](model, **SIZES | {name: 0})


@pytest.mark.parametrize("function", MAKERS)
def test_makers_refuse_what_is_no_model_and_no_manager(model, function):
    with refuses(f"[{function}] model must be a transformers model, got NoneType None"):
        MAKERS[function](None, **SIZES)
    with refuses(f"[{function}] manager must be a KvCacheManager or a DsaManager, got int 3"):
        MAKERS[function](model, **SIZES, manager=3)
    with refuses("[manager_config] model must be a transformers model, got NoneType None"):
        manager_config(None, **SIZES)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("StepDriver", "max_requests"),
        ("StepDriver", "cached_slots"),
        ("StepDriver", "tokens_per_block"),
        ("OffloadedCache", "cached_slots"),
        ("OffloadedCache", "tokens_per_block"),
    ],
)
def test_makers_refuse_sizes_that_a_given_manager_has_settled(model, function, name):
    manager = kvcm.KvCacheManager(manager_config(model, **SIZES, **LEASE))
    with refuses(f"[{function}] {name} must be left out where a manager is given, got 32"):
        MAKERS[function](model, **SIZES, manager=manager, **{name: 32})


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([1.7], 2, "prompt_ids must be of an integer dtype, got torch.float32"),
        ([True], 2, "prompt_ids must be of an integer dtype, got torch.bool"),
        ([1, -1], 2, f"prompt_ids must be in [0, {VOCABULARY}), the model's vocabulary, got -1"),
        ([VOCABULARY], 2, f"the model's vocabulary, got {VOCABULARY} at index 0"),
        ([1], True, "max_new_tokens must be an int, got bool True"),
        ([1], 2.5, "max_new_tokens must be an int, got float 2.5"),
    ],
)
def test_add_refuses_what_is_no_prompt_and_no_count(model, prompt, new, message):
    driver = make_driver(model)
    fresh = occupancy(driver.manager)
    with pytest.raises(ValueError, match=r"^\[StepDriver\.add\] .*" + re.escape(message)):
        driver.add(prompt, new)
    assert driver.requests == ()
    assert occupancy(driver.manager) == fresh


def test_add_takes_ids_of_any_integer_dtype(model):
    driver = make_driver(model)
    ids = [3, 1, VOCABULARY - 1]
    first = driver.add(ids, 1)
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert driver.add(torch.tensor(ids, dtype=dtype), 1).tokens == first.tokens


BAD_TOKENS = {
    "float": (lambda tokens: tokens.float(), "of an integer dtype, got torch.float32"),
    "nan": (lambda tokens: tokens * float("nan"), "of an integer dtype, got torch.float32"),
    "bool": (lambda tokens: tokens > 0, "of an integer dtype, got torch.bool"),
    "negative": (lambda tokens: -1 - tokens, f"in [0, {VOCABULARY}), the model's vocabulary, got"),
    "past": (
        lambda tokens: tokens.clamp(min=VOCABULARY),
        f"in [0, {VOCABULARY}), the model's vocabulary, got {VOCABULARY} at index 0",
    ),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_a_bad_token_of_sample_is_not_committed(model, case):
    spoil, message = BAD_TOKENS[case]
    bad = []

    def sample(logits, requests):
        tokens = greedy(logits, requests)
        return spoil(tokens) if bad else tokens

    driver, reference = make_driver(model, sample=sample), make_driver(model)
    one, expected = driver.add([5, 6, 7], 12), reference.add([5, 6, 7], 12)

    bad.append(case)
    fresh = occupancy(driver.manager)
    with refuses(f"[StepDriver] tokens of sample must be {message}"):
        driver.add([8, 9], 12)
    assert driver.requests == (one,)
    assert occupancy(driver.manager) == fresh

    bad.clear()
    other, other_expected = driver.add([8, 9], 12), reference.add([8, 9], 12)
    driver.step(), reference.step()
    before = [(r.state, list(r.tokens), r.cache.length) for r in driver.requests]
    bad.append(case)
    with refuses(f"[StepDriver] tokens of sample must be {message}"):
        driver.step()
    assert [(r.state, r.tokens, r.cache.length) for r in driver.requests] == before

    bad.clear()
    while driver.requests:
        driver.step(), reference.step()
    assert (one.tokens, other.tokens) == (expected.tokens, other_expected.tokens)


@pytest.mark.parametrize("row", [0, 1])
def test_resume_brings_back_a_request_whose_cache_was_suspended(model, row):
    driver, reference = make_driver(model), make_driver(model)
    requests = [driver.add(ids, 9) for ids in ([1, 2, 3], [4, 5])]
    expected = [reference.add(ids, 9) for ids in ([1, 2, 3], [4, 5])]
    driver.step(), reference.step()
    requests[row].cache.suspend()
    with pytest.raises(kvcm.InvalidState, match="Resume it first"):
        driver.step()
    driver.resume(requests[row])
    assert requests[row].state is RequestState.ACTIVE
    while driver.requests:
        driver.step(), reference.step()
    assert [one.tokens for one in requests] == [one.tokens for one in expected]


def test_a_prompt_whose_first_chunk_is_padding_is_refused_as_a_chunk(model):
    with refuses("got none in row 1. Chunks of a prompt, as with prefill_chunk_size"):
        generate(model, *prompts((40, 20)), 4, offloaded(model), prefill_chunk_size=8)


def test_generate_without_use_cache_is_refused_by_name(model):
    with refuses("Past tokens must not be computed again, as with use_cache=False"):
        generate(model, *prompts((40, 20)), 4, offloaded(model), use_cache=False)
