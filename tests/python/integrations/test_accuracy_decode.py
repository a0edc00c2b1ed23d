"""Batches and figures of the accuracy benchmark, on a driver that follows a script."""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import importlib
import pathlib
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

import sparse_kvcm as kvcm
from sparse_kvcm.models import load_geometry

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def decoding():
    return importlib.import_module("accuracy.decode")


@pytest.fixture
def report():
    return importlib.import_module("accuracy.report")


class Request:
    def __init__(self, script, most):
        self.script, self.most, self.tokens = script, most, [script[0]]


class Driver:
    """Decodes the prompts themselves, over and over; a request leaves after `leave` tokens."""

    def __init__(self, leave=None):
        self.requests, self.leave, self.steps = [], leave, []

    def add(self, prompt, most):
        self.requests.append(Request(prompt, most))
        return self.requests[-1]

    def step(self):
        stepped = list(self.requests)
        for one in stepped:
            one.tokens.append(one.script[len(one.tokens) % len(one.script)])
            if len(one.tokens) == one.most or (one is stepped[0] and self.leave == len(one.tokens)):
                self.requests.remove(one)
        self.steps.append(len(stepped))
        return dict.fromkeys(stepped, 0)

    def remove(self, request):
        if request in self.requests:
            self.requests.remove(request)


class Worker:
    def __init__(self, lease=4, misses=1, units=5, **options):
        self.lease, self.misses, self.units = lease, misses, units
        self.driver = Driver(**options)

    def add(self, prompt, most):
        return self.driver.add(prompt, most)

    def history(self, request):
        return self.units

    def counts(self):
        return 3, self.misses


def run(decoding, worker, prompts, rows=4, new_tokens=6, ends=()):
    return decoding.decode(worker, prompts, rows=rows, new_tokens=new_tokens, ends=frozenset(ends))


def test_every_request_gets_all_its_tokens(decoding):
    worker = Worker()
    made = run(decoding, worker, [[1], [2, 3], [4], [5], [6]], rows=3)
    assert made.tokens == [(1,) * 6, (2, 3) * 3, (4,) * 6, (5,) * 6, (6,) * 6]
    assert worker.driver.steps == [2] * 5 + [3] * 5
    assert (made.steps, made.rows, made.fewest_rows) == (10, 25, 2)
    assert (made.hits, made.misses, made.shortest_history) == (3, 1, 5)


def test_a_batch_stays_whole_until_all_have_ended(decoding):
    worker = Worker()
    made = run(decoding, worker, [[1, 9], [1, 1, 1, 8]], new_tokens=20, ends=[8, 9])
    assert made.tokens == [(1, 9), (1, 1, 1, 8)]
    assert worker.driver.steps == [2, 2, 2]
    assert worker.driver.requests == []


def test_a_batch_that_loses_requests_fails(decoding):
    with pytest.raises(decoding.WorthlessRunError, match="not batched: step 3 had 1 of at least 2"):
        run(decoding, Worker(leave=3), [[1], [2]])


@pytest.mark.parametrize(("units", "fails"), [(3, True), (4, True), (5, False)])
def test_a_history_must_be_longer_than_its_lease(decoding, units, fails):
    worker = Worker(lease=4, units=units)
    if not fails:
        run(decoding, worker, [[1], [2]])
        return
    with pytest.raises(decoding.WorthlessRunError, match=f"request 0 has {units} units and fits"):
        run(decoding, worker, [[1], [2]])


def test_an_offloaded_run_without_a_fetch_fails(decoding):
    with pytest.raises(decoding.WorthlessRunError, match="fetched nothing"):
        run(decoding, Worker(misses=0), [[1], [2]])
    assert run(decoding, Worker(lease=None, misses=0), [[1], [2]]).misses == 0


@pytest.mark.parametrize(
    ("count", "rows", "sizes"),
    [(1, 4, [1]), (4, 4, [4]), (5, 4, [2, 3]), (3, 2, [1, 2]), (9, 4, [3, 3, 3]), (7, 1, [1] * 7)],
)
def test_batches_are_of_nearly_equal_size(decoding, count, rows, sizes):
    assert decoding.batch_sizes(count, rows) == sizes


@pytest.mark.parametrize("kv_dtype", ["fp8", "nvfp4"])
@pytest.mark.parametrize("preset", ["glm-5.2", "deepseek-v3.2", "deepseek-v4-flash"])
def test_a_resident_batch_has_room_at_any_length(monkeypatch, preset, kv_dtype):
    workers = importlib.import_module("accuracy.workers")
    geometry = load_geometry(preset)
    monkeypatch.setattr(workers, "geometry_of", lambda *args: geometry)
    model = SimpleNamespace(config=PretrainedConfig(), device=torch.device("cpu"))
    rows, most = 8, 33_000
    sizes = workers.Sizes(rows, most, kv_dtype, "fp8", 1.0, 2, "compact")
    config = workers.cache_config(model, sizes, offload=False)
    is_v4 = preset.startswith("deepseek-v4")
    storage = config.storage_config() if is_v4 else kvcm.storage_config(config.manager_config())
    layout = kvcm.StorageLayout(storage)
    have = layout.slots_for_quota(0, layout.effective_quota(0, config.gpu_quota))
    for length in range(most - 2 * config.tokens_per_block, most + 1):
        batch = kvcm.BatchDesc([kvcm.KvCacheDesc(length, length - 1)] * rows)
        needs = layout.count_slots(batch)
        assert all(n <= h for n, h in zip(needs, have, strict=True)), (length, needs, have)


def test_figures_are_what_is_counted_by_hand(decoding, report):
    resident = decoding.Run(None, tokens=[(1, 2, 3, 4), (5, 6), (7,)])
    offloaded = decoding.Run(4, tokens=[(1, 9, 3, 4), (5, 6), (7, 8)])
    references = ["1 2 3 4", "5 0", "1 1"]
    figures = report.compare(resident, offloaded, references, lambda ids: " ".join(map(str, ids)))
    assert (figures.identical, figures.total) == (6, 8)
    assert figures.agreement == 0.75
    assert figures.first_difference == [1, None, 1]
    assert figures.rouge_l == pytest.approx(
        {
            "resident": (1 + 1 / 2 + 0) / 3,
            "offloaded": (3 / 4 + 1 / 2 + 0) / 3,
            "offloaded_against_resident": (3 / 4 + 1 + 2 / 3) / 3,
        }
    )
    assert report.faults_of(figures, 0.75) == []
    (fault,) = report.faults_of(figures, 0.76)
    assert "75.00% are identical, --min-agreement is 76.00%" in fault
    assert "2 of 3 requests differ, request 0 from token 1 on" in fault
