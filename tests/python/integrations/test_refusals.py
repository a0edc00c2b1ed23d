"""What the integration cannot do is refused by name, and leaves everything as it was."""

from __future__ import annotations

from tiny_glm import (
    assert_same,
    build,
    build_deepseek,
    forward,
    generate,
    occupancy,
    offloaded,
    prompts,
    stock_result,
    torch,
)

# isort: split
import copy

import pytest
from transformers import DynamicCache

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers import (
    DecodeError,
    DsaGeometry,
    OffloadedCache,
    StepDriver,
    manager_config,
)

LENGTHS = (60, 41)
DONE = 6


@pytest.fixture(scope="module")
def model():
    return build("sparse_kvcm")


@pytest.fixture(scope="module")
def expected():
    return stock_result(LENGTHS, 20)


def snapshot(cache):
    """All that a refused call must leave as it was, arenas byte for byte."""
    state = cache._state
    return (
        [(one.state, one.length, one.lease, one.row, one.host_pages) for one in cache.requests],
        cache.get_seq_length(),
        {layer: keys.tolist() for layer, keys in state.indexer_keys.items()},
        occupancy(cache.manager),
        cache.statistics(),
        state.steps.batch.clock,
        {layer: arena.tolist() for layer, arena in state.steps.arenas.items()},
    )


class Filled:
    """A cache in the middle of a decode, with what comes next."""

    def __init__(self, model, expected):
        self.model, (self.tokens, self.logits) = model, expected
        ids, mask = prompts(LENGTHS)
        self.cache = offloaded(model)
        generate(model, ids, mask, DONE, self.cache)
        self.ids = torch.cat([ids, self.tokens[:, :DONE]], 1)
        self.mask = torch.cat([mask, torch.ones(2, DONE, dtype=torch.long)], 1)
        self.next = self.tokens[:, DONE - 1 : DONE]

    def goes_on(self):
        tokens, logits = generate(self.model, self.ids, self.mask, 20 - DONE, self.cache)
        assert_same(tokens, logits, self.tokens[:, DONE:], self.logits[DONE:])


@pytest.fixture
def filled(model, expected):
    return Filled(model, expected)


def several_tokens(filled):
    mask = torch.cat([filled.mask, filled.mask[:, -1:]], 1)
    forward(filled.model, filled.ids[:, -2:], mask, filled.cache)


def fewer_rows(filled):
    forward(filled.model, filled.next[:1], filled.mask[:1], filled.cache)


def more_rows(filled):
    three = [0, 1, 1]
    forward(filled.model, filled.next[three], filled.mask[three], filled.cache)


def forgotten_mask(filled):
    forward(filled.model, filled.next, None, filled.cache)


def short_mask(filled):
    forward(filled.model, filled.next, filled.mask[:, :-1], filled.cache)


def right_padding(filled):
    mask = filled.mask.clone()
    mask[1, -1] = 0
    forward(filled.model, filled.next, mask, filled.cache)


def hole(filled):
    mask = filled.mask.clone()
    mask[1, 30] = 0
    forward(filled.model, filled.next, mask, filled.cache)


def prepared_mask(filled):
    mask = torch.zeros(2, 1, 1, filled.mask.shape[1])
    forward(filled.model, filled.next, mask, filled.cache)


def crop(filled):
    filled.cache.crop(-1)


def reorder(filled):
    filled.cache.reorder_cache(torch.tensor([1, 0]))


def repeat(filled):
    filled.cache.batch_repeat_interleave(2)


def select(filled):
    filled.cache.batch_select_indices(torch.tensor([0]))


def layer_reset(filled):
    filled.cache.layers[0].reset()


def offload(filled):
    filled.cache.offload(0)


def suspended(filled):
    filled.cache.requests[0].suspend()
    forward(filled.model, filled.next, filled.mask, filled.cache)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (several_tokens, NotImplementedError, "one token per request, got 2"),
        (fewer_rows, ValueError, "expected 2, got 1"),
        (more_rows, ValueError, "expected 2, got 3"),
        (forgotten_mask, ValueError, "padding must stay what it was"),
        (short_mask, ValueError, "attention_mask must have shape"),
        (right_padding, ValueError, "right padding"),
        (hole, ValueError, "padding must be on the left"),
        (prepared_mask, NotImplementedError, "2-D or None"),
        (crop, NotImplementedError, "assisted decoding"),
        (reorder, NotImplementedError, "beams"),
        (repeat, NotImplementedError, "requests cannot be copied"),
        (select, NotImplementedError, "StepDriver"),
        (layer_reset, NotImplementedError, "OffloadedCache.reset"),
        (offload, NotImplementedError, "in host memory already"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_filled_cache_refuses_and_goes_on(filled, call, error, message):
    before = snapshot(filled.cache)
    with pytest.raises(error, match=message):
        call(filled)
    assert snapshot(filled.cache) == before
    filled.goes_on()


def test_a_suspended_request_cannot_decode(filled):
    with pytest.raises(kvcm.InvalidState, match="Resume it first"):
        suspended(filled)
    filled.cache.resume()
    filled.goes_on()


def test_growth_past_max_length_is_refused(model, expected):
    ids, mask = prompts(LENGTHS)
    cache = offloaded(model, max_length=65)
    with pytest.raises(ValueError, match="larger max_length"):
        generate(model, ids, mask, 20, cache)
    assert [request.length for request in cache.requests] == [65, 46]


@pytest.mark.parametrize("new", [2, 17])
def test_prompts_in_chunks_are_refused(model, new):
    ids, mask = prompts(LENGTHS)
    with pytest.raises(NotImplementedError, match="Chunks of a prompt"):
        generate(model, ids, mask, new, offloaded(model), prefill_chunk_size=25)


def test_beams_are_refused(model):
    ids, mask = prompts(LENGTHS)
    with pytest.raises(NotImplementedError, match="beams are not supported"):
        generate(model, ids, mask, 5, offloaded(model, rows=4), num_beams=2)


def test_assisted_decoding_is_refused(model):
    ids, mask = prompts(LENGTHS[:1])
    with pytest.raises((NotImplementedError, ValueError), match="(?i)assisted"):
        generate(model, ids, mask, 5, offloaded(model), assistant_model=build("eager"))


def empty_cache_cases():
    ids, mask = prompts(LENGTHS)
    right = mask.flip(-1)
    hollow = mask.clone()
    hollow[0, 20] = 0
    empty_row = mask.clone()
    empty_row[1] = 0
    long_ids, long_mask = prompts([600, 41])
    three = [0, 1, 1]
    return {
        "right_padding": (ids, right, ValueError, "right padding"),
        "hole": (ids, hollow, ValueError, "padding must be on the left"),
        "empty_row": (ids, empty_row, ValueError, "at least one token"),
        "long_prompt": (long_ids, long_mask, ValueError, "at most max_length = 512"),
        "many_rows": (ids[three], mask[three], ValueError, "at most max_rows = 2"),
        "prepared_mask": (ids, torch.zeros(2, 1, 60, 60), NotImplementedError, "2-D or None"),
    }


@pytest.mark.parametrize("case", empty_cache_cases())
def test_empty_cache_refuses_and_stays_empty(model, expected, case):
    ids, mask, error, message = empty_cache_cases()[case]
    cache = offloaded(model)
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        forward(model, ids, mask, cache)
    assert snapshot(cache) == before
    assert_same(*generate(model, *prompts(LENGTHS), 20, cache), *expected)


def test_a_full_arena_refuses_the_whole_batch(model):
    config = manager_config(
        model, max_rows=2, max_length=128, cached_slots=32, arena_pages=9, tokens_per_block=8
    )
    cache = OffloadedCache(model, max_rows=2, max_length=128, manager=kvcm.KvCacheManager(config))
    before = snapshot(cache)
    with pytest.raises(kvcm.OutOfPages, match="no lease"):
        forward(model, *prompts(LENGTHS), cache)
    assert snapshot(cache) == before


def test_full_host_history_refuses_the_whole_batch(model):
    config = manager_config(  # 10 host pages; the prompts take 8 + 6
        model, max_rows=2, max_length=80, max_requests=1, cached_slots=32, tokens_per_block=8
    )
    cache = OffloadedCache(model, max_rows=2, max_length=128, manager=kvcm.KvCacheManager(config))
    fresh = occupancy(cache.manager)
    with pytest.raises(kvcm.OutOfPages):
        forward(model, *prompts(LENGTHS), cache)
    assert cache.get_seq_length() == 0
    assert occupancy(cache.manager) == fresh


def test_another_attention_implementation_is_refused(filled):
    before = snapshot(filled.cache)
    filled.model.set_attn_implementation("eager")
    try:
        with pytest.raises(ValueError, match='must be "sparse_kvcm", got "eager"'):
            forward(filled.model, filled.next, filled.mask, filled.cache)
    finally:
        filled.model.set_attn_implementation("sparse_kvcm")
    assert snapshot(filled.cache) == before
    filled.goes_on()


def test_a_model_of_another_implementation_is_refused_when_it_has_its_own_config(model):
    cache = offloaded(model)
    with pytest.raises(NotImplementedError, match="2-D or None"):
        forward(build("eager"), *prompts(LENGTHS), cache)
    assert cache.get_seq_length() == 0


def test_attention_refuses_a_foreign_cache(model):
    with pytest.raises(ValueError, match="must have an OffloadedCache"):
        forward(model, *prompts(LENGTHS), DynamicCache(config=model.config))


def test_attention_refuses_a_foreign_cache_after_a_failed_forward(filled):
    def fail(module, args):
        handle.remove()
        raise KeyError("injected")

    handle = filled.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        forward(filled.model, filled.next, filled.mask, filled.cache)
    with pytest.raises(ValueError, match="must have an OffloadedCache"):
        forward(filled.model, filled.ids, filled.mask, DynamicCache(config=filled.model.config))
    filled.goes_on()


def test_a_call_on_the_cache_within_a_forward_is_refused_by_the_next_layer(filled):
    def call(module, args):
        handle.remove()
        filled.cache.get_seq_length()

    handle = filled.model.model.layers[1].mlp.register_forward_pre_hook(call)
    with pytest.raises(kvcm.InvalidState, match="in the middle of a forward"):
        forward(filled.model, filled.next, filled.mask, filled.cache)
    filled.goes_on()


def test_a_fault_on_the_device_is_raised_and_undone(filled, monkeypatch):
    steps = filled.cache._state.steps
    select = steps.select
    monkeypatch.setattr(steps, "select", lambda group, ordinals: select(group, ordinals + 1000))
    with pytest.raises(DecodeError, match="RANGE"):
        forward(filled.model, filled.next, filled.mask, filled.cache)
    monkeypatch.undo()
    filled.goes_on()


def test_other_models_are_refused():
    for change, error, message in [
        ({"model_type": "llama"}, NotImplementedError, "got llama"),
        ({"layer_types": ["sliding_attention"] * 5}, NotImplementedError, "sliding_attention"),
        ({"indexer_types": ["shared"] * 5}, ValueError, "layer 0 must own an indexer"),
    ]:
        config = copy.deepcopy(build("sparse_kvcm").config)
        for name, value in change.items():
            object.__setattr__(config, name, value)
        with pytest.raises(error, match=message):
            DsaGeometry.from_config(config, torch.float32)


def test_other_dtypes_are_refused(model):
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.int8):
        with pytest.raises(NotImplementedError, match=f"got {dtype}"):
            DsaGeometry.from_config(model.config, dtype)
    cache = offloaded(model)
    with pytest.raises(ValueError, match=r"latents must be torch\.float32"):
        forward(build("sparse_kvcm", torch.bfloat16), *prompts(LENGTHS), cache)
    assert cache.requests == ()


def test_a_manager_for_another_model_is_refused(model):
    config = manager_config(build_deepseek("sparse_kvcm"), max_rows=2, max_length=64)
    with pytest.raises(ValueError, match="manager's groups must be"):
        OffloadedCache(model, max_rows=2, max_length=64, manager=kvcm.KvCacheManager(config))
    config = manager_config(build("sparse_kvcm", torch.bfloat16), max_rows=2, max_length=64)
    with pytest.raises(ValueError, match=r"region_bytes of group 0 must be \[160\]"):
        OffloadedCache(model, max_rows=2, max_length=64, manager=kvcm.KvCacheManager(config))


def test_an_unknown_form_is_refused(model):
    with pytest.raises(ValueError, match="form must be one of scatter, compact, triton, got other"):
        offloaded(model, form="other")


def test_driver_refuses_what_it_cannot_do(model):
    with pytest.raises(ValueError, match='must be "sparse_kvcm", got "eager"'):
        StepDriver(build("eager"), max_rows=2, max_length=64)
    driver = StepDriver(model, max_rows=1, max_length=64, cached_slots=32, tokens_per_block=8)
    fresh = occupancy(driver.manager)
    for prompt, new, message in [
        ([], 4, "at least 1 token"),
        ([[1, 2], [3, 4]], 4, "one row"),
        ([1, 2], 0, "max_new_tokens must be >= 1, got 0"),
        ([1] * 60, 6, "at most max_length = 64 units, got 65"),
    ]:
        with pytest.raises(ValueError, match=message):
            driver.add(prompt, new)
    assert occupancy(driver.manager) == fresh
    assert driver.step() == {}
    request = driver.add([1] * 60, 5)
    with pytest.raises(kvcm.OutOfPages, match="no lease"):
        driver.add([1], 1)
    driver.remove(request)
    assert occupancy(driver.manager) == fresh
    wrong = StepDriver(model, max_rows=1, max_length=64, sample=lambda logits, requests: logits)
    with pytest.raises(ValueError, match=r"tokens of shape \(1,\)"):
        wrong.add([1], 1)
    for function in (driver.suspend, driver.resume):
        with pytest.raises(kvcm.InvalidState, match="it is finished"):
            function(request)
