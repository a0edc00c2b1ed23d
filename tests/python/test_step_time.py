"""The planner's model of time: what it sums, and the measured runs that it was fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.decode_slice import fit, report
from sparse_kvcm.models import load_geometry
from sparse_kvcm.planner.step_time import H200, Step

BOUND = 0.15
RUNS = fit.usable(json.loads(fit.RESULTS.read_text())["runs"])
GLM = load_geometry("glm-5.2")


def name_of(run: dict[str, Any]) -> str:
    return f"{run['model']}-{run['prompt']}-{run['mode']}-{run['batch']}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_a_committed_run_is_predicted(run: dict[str, Any]) -> None:
    """With the miss share of the planner's curve, too."""
    (error,) = fit.errors([run], H200)
    assert abs(error) < BOUND
    report.predict(run, [])
    assert run["predicted"]["error"] == pytest.approx(error)


def test_committed_runs_are_predicted_without_those_of_their_batch() -> None:
    errors = fit.left_out(RUNS, "model", "prompt", "batch")
    assert len(errors) >= 38
    assert max(map(abs, errors)) < BOUND


def test_committed_runs_are_predicted_without_those_of_their_model() -> None:
    errors = fit.left_out(RUNS, "model")
    assert max(map(abs, errors)) < BOUND


def test_fetches_are_bound_by_stretches_where_misses_lie_far_apart() -> None:
    """18 units of 512 B in 4 MB, V4 Flash; not 525 of 576 B in 19 MB, V3.2, or rows of 2,304 B."""
    for model, size, misses, far in (
        ("deepseek-v4-flash", 512, 18.5, True),
        ("deepseek-v3.2", 576, 525, False),
        ("glm-5.2", 2304, 199, False),
    ):
        step = Step(load_geometry(model), 100, 32_768, 1, misses, (size,))
        _, copied_ms, stretches = step.sums()["fetch"]
        assert (copied_ms == 0) is far
        assert (stretches > 0) is far
    assert step.sums()["fetch"][1] == pytest.approx(100 * 199 * 2304 / 55e6)


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    costs = {part: tuple(2 * cost for cost in each) for part, each in H200.items()}
    made = []
    for run in RUNS:
        parts = report.step_of(run, measured=True).parts_ms(costs)
        made.append(run | {"phases_ms": parts, "step_ms": sum(parts.values())})
    for part, found in fit.fit(made).items():
        assert found == pytest.approx(costs[part], rel=1e-3)


def test_one_token_meets_its_experts_and_many_meet_all_of_a_rank() -> None:
    def met(batch: int, ranks: int) -> float:
        compute = GLM.compute
        assert compute is not None
        layers, read, _ = Step(GLM, batch, 4096, ranks).sums()["experts"]
        return read / layers / compute.expert_weights * 1e9

    assert met(1, 1) == pytest.approx(8)
    assert met(100_000, 1) == pytest.approx(256)
    assert met(100_000, 8) == pytest.approx(32)
    assert met(1, 8) < 8


def test_weights_of_a_layer_are_those_of_the_slice() -> None:
    """GLM-5.2: query, latent, expansion, output, shared expert, router."""
    compute = GLM.compute
    assert compute is not None
    query = 6144 * 2048 + 2048 * 64 * 256
    expanded = 64 * 512 * (192 + 256)
    rest = 6144 * 576 + 64 * 256 * 6144 + 3 * 6144 * 2048 + 6144 * 256
    assert compute.dense_weights(576, 512) == query + expanded + rest


def test_a_longer_batch_takes_longer_in_every_part() -> None:
    rows = (2304,) * 21
    few, many = (Step(GLM, b, 32_768, 8, 200.0, rows).parts_ms() for b in (100, 200))
    assert few.keys() == many.keys() == H200.keys()
    assert all(few[part] < many[part] for part in few)


def test_a_slower_link_takes_longer_for_rows_of_any_length() -> None:
    for size in (512, 2304):
        times = [
            Step(GLM, 100, 32_768, 8, 200.0, (size,) * 21, link).parts_ms()["fetch"]
            for link in (1.0, 10.0, 20.0)
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] > 1.9 * times[2]


def test_a_model_of_unknown_sizes_has_the_parts_of_offload_alone() -> None:
    unknown = replace(GLM, compute=None)
    assert set(Step(unknown, 1, 4096, 1, 1.0, (2304,) * 21).parts_ms()) == {"cache", "fetch"}
    assert Step(unknown, 1, 4096).parts_ms() == {}
