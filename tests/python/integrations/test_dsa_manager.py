"""The step driver on DSA managers, against the stock model stepped with equal seats."""

from __future__ import annotations

from tiny_glm import TOP_K, Recorder, build, build_deepseek, cache_argument, torch

# isort: split
import pytest

from sparse_kvcm.dsa import DsaCacheConfig, DSACacheManager, DSACacheManagerV2, OffloadSizes
from sparse_kvcm.integrations.transformers import OffloadedCache, StepDriver
from sparse_kvcm.models import geometry_of
from stock_driver import StockDriver
from test_driver import MAX_ROWS, come_and_go, prompt, steps, suspend_and_resume

BF16 = torch.bfloat16
RESIDENT = "2 resident"


def make_manager(model, version, **sizes):
    """1, 2 or "2 resident". Leases of 32 + 8 slots under version 2, far below the histories."""
    config = DsaCacheConfig(
        geometry_of(model.config.to_dict()),
        max_batch_size=MAX_ROWS,
        max_seq_len=256,
        gpu_quota=16 << 20,
        index_dtype="bf16",
        tokens_per_block=8,
        device=str(model.device),
        cold_quota=16 << 20 if version == RESIDENT else 0,
        offload=None
        if version != 2
        else OffloadSizes(
            **({"cached_slots": 32, "host_pages": 256, "cold_quota": 4 << 20} | sizes)
        ),
    )
    return DSACacheManager(config) if version == 1 else DSACacheManagerV2(config)


def short(driver):
    """A few steps of two requests, one of which is suspended in between."""
    a, b = driver.add(prompt(70), 12), driver.add(prompt(40), 8)
    steps(driver, 3)
    driver.suspend(a)
    steps(driver, 3)
    driver.resume(a)
    steps(driver, 12)
    return [a, b]


def check(program, version, make=build, exact=True, manager=None, **options):
    """Run a program on both; logits of each forward must be bit-equal, tokens equal."""
    model, recorder = make("sparse_kvcm", BF16), Recorder()
    manager = manager or make_manager(model, version)
    driver = StepDriver(
        model, max_rows=MAX_ROWS, max_length=256, manager=manager, sample=recorder, **options
    )
    oracle = StockDriver(make("eager", BF16), MAX_ROWS)
    tokens = [request.tokens for request in program(driver)]
    assert tokens == [request.tokens for request in program(oracle)]
    assert len(recorder.logits) == len(oracle.logits)
    for step, (logits, reference) in enumerate(zip(recorder.logits, oracle.logits, strict=True)):
        assert not exact or torch.equal(logits, reference), f"forward {step}"
    driver.close()
    return driver


@pytest.mark.parametrize(
    ("program", "make", "version"),
    [
        (come_and_go, build, 1),
        (come_and_go, build, 2),
        (suspend_and_resume, build, 2),
        (come_and_go, build_deepseek, 2),
        (suspend_and_resume, build, RESIDENT),
        (come_and_go, build_deepseek, RESIDENT),
    ],
    ids=["glm5-v1", "glm5-v2", "glm5-v2-suspended", "v32-v2", "glm5-resident", "v32-resident"],
)
def test_logits_bit_equal_while_requests_come_and_go(device, program, make, version):
    driver = check(program, version, make)
    misses = sum(one.misses for one in driver.statistics())
    assert (misses > 0) == (version == 2)


@pytest.mark.parametrize("version", [1, 2, RESIDENT])
def test_compact_form_gives_the_same_tokens_in_one_batch(device, version):
    check(short, version, exact=False, form="compact")


@pytest.mark.parametrize("version", [1, 2, RESIDENT])
def test_a_forward_that_fails_is_followed_by_a_good_step(device, version):
    model = build("sparse_kvcm", BF16)
    layer = model.model.layers[3].mlp

    def fail(*args):
        raise ZeroDivisionError

    def program(driver):
        a, b = driver.add(prompt(70), 20), driver.add(prompt(40), 20)
        steps(driver, 3)
        if isinstance(driver, StepDriver):
            for _ in range(2):
                hook = layer.register_forward_pre_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    driver.step()
                hook.remove()
        steps(driver, 20)
        return [a, b]

    check(program, version)


@pytest.mark.parametrize("version", [1, 2, RESIDENT])
def test_requests_give_everything_back(device, version):
    manager = make_manager(build("sparse_kvcm", BF16), version)
    storage = manager.storage if version == 1 else manager.manager.storage
    fresh = [one.free for one in storage.get_storage_statistics(0)]
    for _ in range(2):  # a manager serves one driver after another
        check(short, version, manager=manager)
        assert [one.free for one in storage.get_storage_statistics(0)] == fresh


def test_selections_as_wide_as_the_cache_are_served(device):
    manager = make_manager(build("sparse_kvcm", BF16), 2, cached_slots=TOP_K)
    check(short, 2, manager=manager)


@pytest.mark.parametrize("version", [1, 2, RESIDENT])
def test_generate_runs_on_a_dsa_manager(device, version):
    model, stock = build("sparse_kvcm", BF16), build("eager", BF16)
    ids = torch.tensor([prompt(60)], device=model.device)
    expected = stock.generate(ids, max_new_tokens=20, do_sample=False)
    cache = OffloadedCache(model, max_rows=1, max_length=80, manager=make_manager(model, version))
    tokens = model.generate(
        ids, max_new_tokens=20, do_sample=False, **{cache_argument(model): cache}
    )
    assert torch.equal(tokens, expected)


def test_a_manager_of_another_model_is_refused(device):
    model = build("sparse_kvcm", BF16)
    manager = make_manager(build_deepseek("sparse_kvcm", BF16), 2)
    with pytest.raises(ValueError, match="groups, rank and rope of the manager must be"):
        StepDriver(model, max_rows=MAX_ROWS, max_length=256, manager=manager)
    with pytest.raises(ValueError, match="max_rows must be <= 3"):
        StepDriver(model, max_rows=4, max_length=256, manager=make_manager(model, 1))
