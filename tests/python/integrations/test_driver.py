"""The step driver against the stock model stepped with equal seats, padding and batch."""

from __future__ import annotations

from tiny_glm import TOP_K, VOCABULARY, Recorder, build, build_deepseek, occupancy, torch

# isort: split
import random

import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers import RequestState, StepDriver, manager_config
from stock_driver import StockDriver

MAX_ROWS = 3


@pytest.fixture
def stock(device):
    return build("eager")


@pytest.fixture
def model(device):
    return build("sparse_kvcm")


def prompt(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(1, VOCABULARY) for _ in range(length)]


def make_driver(model, *, sizes=None, **options):
    fields = {"max_rows": MAX_ROWS, "max_length": 256, "cached_slots": 32, "tokens_per_block": 8}
    config = manager_config(
        model, **({"arena_pages": 30, "max_requests": 8} | fields | (sizes or {}))
    )
    recorder = Recorder()
    driver = StepDriver(
        model,
        max_rows=MAX_ROWS,
        max_length=256,
        manager=kvcm.KvCacheManager(config),
        sample=recorder,
        **options,
    )
    return driver, recorder


def check(program, stock, model, *, sizes=None, eos_token_id=None, exact=True, **options):
    """Run a program on both; logits of each forward must be bit-equal, tokens equal."""
    driver, recorder = make_driver(model, sizes=sizes, eos_token_id=eos_token_id, **options)
    oracle = StockDriver(stock, MAX_ROWS, eos_token_id)
    fresh = occupancy(driver.manager)
    tokens = [request.tokens for request in program(driver)]
    expected = [request.tokens for request in program(oracle)]
    assert tokens == expected
    assert len(recorder.logits) == len(oracle.logits)
    for step, (logits, reference) in enumerate(zip(recorder.logits, oracle.logits, strict=True)):
        if exact:
            assert torch.equal(logits, reference), f"forward {step}"
        else:
            torch.testing.assert_close(logits, reference, rtol=0, atol=1e-3)
    driver.close()
    assert occupancy(driver.manager) == fresh
    return driver


def steps(driver, count):
    for _ in range(count):
        driver.step()


def come_and_go(driver):
    """Join, finish at different steps, reuse of rows, leave early."""
    a = driver.add(prompt(100), 40)
    b = driver.add(prompt(37), 9)
    steps(driver, 4)
    c = driver.add(prompt(5), 70)
    steps(driver, 10)  # b ends in here
    d = driver.add(prompt(150), 12)  # takes the row of b
    steps(driver, 5)
    driver.remove(a)
    e = driver.add(prompt(TOP_K), 20)
    steps(driver, 60)
    assert driver.step() == {}
    return [a, b, c, d, e]


def suspend_and_resume(driver):
    """Suspension over several steps, resumption into another row."""
    a, b = driver.add(prompt(100), 50), driver.add(prompt(60), 50)
    steps(driver, 5)
    driver.suspend(a)
    steps(driver, 6)
    c = driver.add(prompt(80), 30)  # sits where a sat
    driver.resume(a)
    steps(driver, 3)
    driver.suspend(b)
    driver.suspend(c)
    steps(driver, 2)
    driver.resume(c)
    driver.resume(b)
    driver.suspend(a)
    driver.resume(a)
    steps(driver, 50)
    return [a, b, c]


@pytest.mark.parametrize("program", [come_and_go, suspend_and_resume])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_bit_equal_while_requests_come_and_go(device, program, dtype):
    check(program, build("eager", dtype), build("sparse_kvcm", dtype))


@pytest.mark.parametrize("program", [come_and_go, suspend_and_resume])
def test_logits_bit_equal_with_as_many_cached_slots_as_selected_units(stock, model, program):
    check(program, stock, model, sizes={"cached_slots": TOP_K})


@pytest.mark.parametrize("program", [come_and_go, suspend_and_resume])
def test_logits_bit_equal_with_leases_that_are_all_window(stock, model, program):
    check(program, stock, model, sizes={"cached_slots": 192, "arena_pages": 100})


@pytest.mark.parametrize("program", [come_and_go, suspend_and_resume])
def test_compact_form_gives_the_same_tokens(stock, model, program):
    check(program, stock, model, exact=False, form="compact")


def test_logits_bit_equal_for_deepseek_v32(device):
    check(come_and_go, build_deepseek("eager"), build_deepseek("sparse_kvcm"))


@pytest.mark.parametrize("seed", range(4))
def test_logits_bit_equal_for_random_programs(stock, model, seed):
    def program(driver):
        choose = random.Random(seed)
        requests, suspended = [], []

        def active():
            return [
                one
                for one in requests
                if one not in suspended and len(one.tokens) < one.max_new_tokens
            ]

        for _ in range(60):
            action = choose.choice(["step", "step", "step", "add", "suspend", "resume"])
            if action == "add" and len(active()) < MAX_ROWS and len(active() + suspended) < 8:
                requests.append(
                    driver.add(prompt(choose.randint(1, 90), seed), choose.randint(1, 25))
                )
            elif action == "suspend" and active():
                suspended.append(choose.choice(active()))
                driver.suspend(suspended[-1])
            elif action == "resume" and suspended and len(active()) < MAX_ROWS:
                driver.resume(suspended.pop(choose.randrange(len(suspended))))
            else:
                driver.step()
        return requests

    check(program, stock, model, sizes={"arena_pages": 60})


def test_a_request_finishes_with_its_end_token(stock, model):
    def program(driver):
        request = driver.add(prompt(60), 30)
        steps(driver, 40)
        return [request]

    expected = program(StockDriver(stock, 1))[0].tokens
    check(program, stock, model, eos_token_id=expected[12])


def test_a_request_for_one_token_is_finished_by_its_prompt(model):
    driver, _ = make_driver(model)
    request = driver.add(prompt(20), 1)
    assert request.state is RequestState.FINISHED
    assert len(request.tokens) == 1
    assert driver.requests == ()


def test_suspended_requests_hold_no_lease(model):
    driver, _ = make_driver(model)
    free = driver.manager.occupancy().free_arena_slots
    request = driver.add(prompt(60), 30)
    assert driver.manager.occupancy().free_arena_slots < free
    driver.suspend(request)
    assert driver.manager.occupancy().free_arena_slots == free
    assert request.state is RequestState.SUSPENDED
    driver.remove(request)
    assert request.state is RequestState.FINISHED
    assert driver.requests == ()


def test_a_full_arena_leaves_a_request_suspended(stock, model):
    driver, _ = make_driver(model, sizes={"arena_pages": 10})  # two leases of 5 pages
    oracle = StockDriver(stock, MAX_ROWS)
    a, b = driver.add(prompt(60), 30), driver.add(prompt(80), 30)
    expected = [oracle.add(prompt(60), 30), oracle.add(prompt(80), 30)]
    driver.suspend(a)
    oracle.suspend(expected[0])
    c = driver.add(prompt(70), 30)
    expected.append(oracle.add(prompt(70), 30))
    with pytest.raises(kvcm.OutOfPages, match="no lease"):
        driver.resume(a)
    with pytest.raises(kvcm.OutOfPages, match="no lease"):
        driver.add(prompt(90), 10)
    assert a.state is RequestState.SUSPENDED
    steps(driver, 30)
    steps(oracle, 30)
    driver.resume(a)
    oracle.resume(expected[0])
    steps(driver, 30)
    steps(oracle, 30)
    assert [one.tokens for one in (a, b, c)] == [one.tokens for one in expected]


def test_full_host_history_stops_growth_without_harm(model):
    sizes = {"max_requests": 1, "max_length": 80, "window_slots": 8}  # 10 host pages of 8
    driver, _ = make_driver(model, sizes=sizes)
    a = driver.add(prompt(40), 60)  # may grow to 99 units
    with pytest.raises(kvcm.OutOfPages, match="host history is full"):
        steps(driver, 60)
    tokens = list(a.tokens)
    with pytest.raises(kvcm.OutOfPages, match="host history is full"):
        driver.step()
    assert a.tokens == tokens
    assert a.cache.length == a.cache.committed_length
    with pytest.raises(kvcm.OutOfPages):  # the window's units have nowhere to go
        driver.suspend(a)
    assert a.state is RequestState.ACTIVE
    driver.remove(a)
    b = driver.add(prompt(40), 20)
    steps(driver, 20)
    assert len(b.tokens) == 20


def test_statistics_count_committed_steps(model):
    driver, _ = make_driver(model)
    a = driver.add(prompt(100), 31)
    b = driver.add(prompt(60), 11)
    steps(driver, 20)
    assert (len(a.tokens), len(b.tokens)) == (21, 11)
    for statistics, layers in zip(driver.statistics(), [(0, 1, 2), (3, 4)], strict=True):
        assert statistics.layers == layers
        assert (statistics.steps, statistics.rows) == (20, 30)
        unit_bytes = 40 * 4 * len(layers)
        assert statistics.bytes_fetched == statistics.misses * unit_bytes
        assert statistics.device_bytes == 40 * unit_bytes
        assert statistics.history_bytes == 120 * unit_bytes
        # Each row selects 16 units; those in the window are neither hits nor misses.
        assert 0 < statistics.hits + statistics.misses <= 30 * TOP_K
