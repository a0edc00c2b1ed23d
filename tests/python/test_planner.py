"""The planner: published admissions, limits, misses, and the recommended cache."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, PLENTY, available, small, tiny_dsa, worker_config
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.models import load_geometry
from sparse_kvcm.planner import (
    LOCALITIES,
    Budgets,
    Plan,
    find_locality,
    lease_bytes,
    make_plan,
    recommend_factor,
    resolve_auto,
    sweep_factors,
)
from sparse_kvcm.sizing import Machine, Workload, size_device, size_worker

GLM = Workload(load_geometry("glm-5.2"), 32_928, "fp8")
V4 = Workload(load_geometry("deepseek-v4-flash"), 32_928, gpu_cache_factor=4)


def factor_of(config: WorkerConfig) -> float:
    return float(config.sparse_attention_config.kv_cache_offload_config.gpu_cache_factor)


def plan(workload: Workload, device_bytes: int, **budgets: Any) -> Plan:
    locality = find_locality(None, workload.geometry.name)
    return make_plan(workload, Budgets(device_bytes, **budgets), locality)


# Published for one GPU, TensorRT-LLM PR 21350: 29 resident, 158 offloaded, a row of 177.5 MiB.
def test_glm_5_2_is_admitted_as_published() -> None:
    result = plan(GLM, 45_600_000_000)
    assert 28 <= result.resident.max_batch <= 30
    assert 150 <= result.offload.max_batch <= 165
    assert lease_bytes(GLM) == pytest.approx(177.5 * (1 << 20), rel=0.01)
    assert result.offload.row_bytes == lease_bytes(GLM)


# Published for one GPU: 633 resident, 1,500 offloaded. BF16 units, the default, reach it. FP8 units
# cannot, since what stays on the GPU does not shrink with them (design, section 10).
@pytest.mark.parametrize(("kv_dtype", "least"), [("bf16", 1500), ("fp8", 1250)])
def test_v4_flash_is_admitted_as_published(kv_dtype: Any, least: int) -> None:
    workload = replace(V4, kv_dtype=kv_dtype)
    needed = size_device(workload, 1 << 40, 633, offload=False)
    budget = needed.pool_floor + needed.fixed_bytes
    result = plan(workload, budget)
    assert result.resident.max_batch == 633
    assert result.offload.max_batch >= least


def test_the_plan_s_batch_is_the_one_that_a_worker_is_admitted_with() -> None:
    geometry = tiny_dsa()
    workload = small(5000)
    budgets = Budgets(64 << 20, host_bytes=GIB)
    locality = find_locality(None, "tiny")
    batch = make_plan(workload, budgets, locality).offload.max_batch
    memory = available(4 * GIB)
    for extra, agrees in ((0, True), (1, False)):
        config = worker_config(batch + extra, 5000)
        sizing = size_worker(config, geometry, Machine(64 << 20, host=memory))
        assert (sizing.capacity.batch == batch + extra) is agrees


def test_host_memory_limits_the_batch_and_says_so() -> None:
    of_one = plan(GLM, 45_600_000_000).offload.host_bytes_per_request
    result = plan(GLM, 45_600_000_000, host_bytes=10 * of_one + of_one // 2)
    assert result.offload.max_batch == 10
    assert result.offload.binding_limit == "host history"
    assert "--host-memory" in result.offload.advice
    assert result.resident.max_batch == 28


def test_pages_of_suspended_requests_leave_less_for_history() -> None:
    of_one = plan(GLM, 45_600_000_000).offload.host_bytes_per_request
    for spare, batch in ((10_000_000, 9), (20_000_000, 10)):  # a pool of a granule takes 16.8 MB
        result = plan(GLM, 45_600_000_000, host_bytes=10 * of_one + spare)
        assert result.offload.max_batch == batch


def test_a_batch_limit_is_a_limit() -> None:
    result = plan(GLM, 45_600_000_000, max_batch_size=20)
    assert result.resident.max_batch == result.offload.max_batch == 20
    assert result.offload.binding_limit == "max_batch_size"


def test_a_budget_for_nobody_gives_0_and_not_an_error() -> None:
    result = plan(GLM, 10_000_000)
    assert result.resident.max_batch == result.offload.max_batch == 0


@pytest.mark.parametrize("workload", [GLM, V4, small(5000)], ids=["glm", "v4", "tiny"])
def test_parts_of_a_request_sum_to_what_the_batch_needs(workload: Workload) -> None:
    result = plan(workload, 40_000_000_000, max_batch_size=2000)
    for side, offload in ((result.resident, False), (result.offload, True)):
        sizing = size_device(workload, 40_000_000_000, side.max_batch, offload=offload)
        needed = sizing.fixed_bytes + sizing.pool_floor
        parts = sum(side.bytes_per_request.values())
        assert needed / side.max_batch - 8 <= parts <= needed / side.max_batch
        assert all(size >= 0 for size in side.bytes_per_request.values())


def test_misses_of_glm_5_2_fetch_what_the_design_says() -> None:
    """At the length that the figure is for: 13.4 % of 2,048 units, 78 layers, 576 B."""
    offload = plan(replace(GLM, max_seq_len=65_536), 45_600_000_000).offload
    each = 0.134 * 2048 * 78 * 576
    assert offload.misses_per_step == pytest.approx(0.134 * 2048)
    assert offload.fetch_bytes_per_step == pytest.approx(each * offload.max_batch)
    copy_ms = offload.fetch_bytes_per_step / 55e6
    assert 1.05 * copy_ms < offload.step_ms["fetch"] < 1.2 * copy_ms + 1


def test_a_request_that_is_all_window_misses_nothing() -> None:
    result = plan(replace(GLM, max_seq_len=4096 + 64), 45_600_000_000)
    assert result.offload.misses_per_step == 0
    assert result.offload.step_ms["fetch"] < 0.3  # launches


@pytest.mark.parametrize("name", LOCALITIES)
def test_longer_histories_miss_more_and_short_ones_hardly(name: str) -> None:
    curve = LOCALITIES[name]
    for factor in (1, 1.5, 2, 3, 4, 8):
        assert curve.miss_share(factor, curve.spread) == curve.miss_share(factor)
        shares = [curve.miss_share(factor, spread) for spread in (4, 5, 16, 40, 512, 4096)]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] <= 1
    assert curve.miss_share(4, 4) < 0.005


# Measured in benchmarks/results/h200/decode_slice.json, with traces of the same model.
@pytest.mark.parametrize(
    ("name", "factor", "spread", "measured"),
    [("glm51", 2, 16, 0.097), ("glm51", 2, 64, 0.165), ("v4_flash", 4, 16, 0.036)],
)
def test_misses_of_measured_runs(name: str, factor: float, spread: float, measured: float) -> None:
    assert LOCALITIES[name].miss_share(factor, spread) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", LOCALITIES)
def test_a_miss_curve_goes_through_its_points_and_falls(name: str) -> None:
    curve = LOCALITIES[name]
    for factor, share in zip((1, 2, 4), curve.misses, strict=True):
        assert math.isclose(curve.miss_share(factor), share)
    shares = [curve.miss_share(1 + step / 8) for step in range(200)]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share <= 1 for share in shares)


def test_a_faster_link_wants_a_smaller_cache() -> None:
    curve = LOCALITIES["glm51"]
    factors = [
        recommend_factor(GLM, Budgets(45_600_000_000, link_gb_s=link), curve)
        for link in (10, 50, 400)
    ]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > factors[-1]


def test_the_recommended_cache_is_the_fastest_of_the_sweep() -> None:
    budgets, curve = Budgets(45_600_000_000), LOCALITIES["glm51"]
    sides = sweep_factors(GLM, budgets, curve)
    best = recommend_factor(GLM, budgets, curve)
    assert max(side.tokens_per_s for side in sides) == next(
        side.tokens_per_s for side in sides if side.gpu_cache_factor == best
    )
    batches = [side.max_batch for side in sides]
    assert batches == sorted(batches, reverse=True)


def test_auto_becomes_the_recommended_factor_and_a_number_stays() -> None:
    machine = Machine(64 << 20, host=PLENTY, link_gb_s=0.01)
    config = worker_config(3, 5000, offload={"gpu_cache_factor": "auto"})
    with pytest.raises(kvcm.InvalidArgument, match="gpu_cache_factor must be a number"):
        size_worker(config, tiny_dsa(), machine)
    fixed = resolve_auto(config, tiny_dsa(), machine)
    budgets = Budgets(64 << 20, PLENTY.automatic, 0.01, max_batch_size=3)
    best = recommend_factor(small(5000), budgets, LOCALITIES["glm51"])
    assert factor_of(fixed) == best > 2
    assert resolve_auto(fixed, tiny_dsa(), machine) == fixed


@pytest.mark.parametrize("batch", [1, 40, 60, 80, 120, 160])
def test_auto_leaves_room_to_seat_the_batch(batch: int) -> None:
    wide = tiny_dsa(kv_lora_rank=512, qk_rope_head_dim=64)
    machine = Machine(64 << 20, host=PLENTY, link_gb_s=0.01)  # slow: the largest cache is best
    config = worker_config(batch, 3000, offload={"gpu_cache_factor": "auto"})
    fixed = resolve_auto(config, wide, machine)
    try:
        size_worker(fixed, wide, machine)
    except kvcm.InvalidArgument:
        with pytest.raises(kvcm.InvalidArgument, match="max_batch_size must be <="):
            size_worker(worker_config(batch, 3000, offload={"gpu_cache_factor": 1}), wide, machine)


def test_a_measured_step_takes_the_place_of_the_model_s_parts() -> None:
    result = plan(GLM, 45_600_000_000, step_ms=25)
    assert result.resident.step_ms == {"model": 25}
    assert result.resident.tokens_per_s == 40 * result.resident.max_batch
    assert list(result.offload.step_ms) == ["model", "cache", "fetch"]
    assert result.warnings == []


def test_a_model_of_unknown_sizes_is_a_warning() -> None:
    result = plan(small(5000), 64 << 20)
    assert "What a step of tiny takes is not known; 25 ms are taken." in result.warnings
    assert result.resident.step_ms == {"model": 25}


@pytest.mark.parametrize("field", ["link_gb_s", "step_ms"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "50", True])
def test_a_speed_that_is_none_is_refused(field: str, value: Any) -> None:
    with pytest.raises(
        kvcm.InvalidArgument, match=f"{field} must be > 0 and finite, got {value!r}"
    ):
        Budgets(GIB, **{field: value})


@pytest.mark.parametrize("field", ["link_gb_s", "step_ms"])
@pytest.mark.parametrize("value", [1e-320, 1e-10, 1e10, 1e308])
def test_a_speed_that_makes_a_plan_infinite_is_refused(field: str, value: float) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"{field} must be in \[1e-09, 1e\+09\], got"):
        Budgets(GIB, **{field: value})


@pytest.mark.parametrize("fields", [{"link_gb_s": 1e-9}, {"step_ms": 1e-9}, {"step_ms": 1e9}])
def test_a_plan_by_extreme_speeds_is_json_of_finite_numbers(fields: dict[str, float]) -> None:
    json.dumps(plan(GLM, 45_600_000_000, **fields).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_bytes", 0),
        ("device_bytes", True),
        ("device_bytes", 1e9),
        ("host_bytes", -1),
        ("host_bytes", "1GB"),
        ("max_batch_size", 0),
        ("max_batch_size", (1 << 20) + 1),
        ("expert_ranks", 0),
    ],
)
def test_a_budget_that_is_no_number_is_refused(field: str, value: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"\[Budgets\] {field} must be an integer in"):
        Budgets(**({"device_bytes": GIB} | {field: value}))


def test_a_length_that_the_model_does_not_take_is_a_warning() -> None:
    short = load_geometry("deepseek-v3.2")
    assert plan(Workload(short, 163_840), GIB).warnings == []
    (warning,) = plan(Workload(short, 163_841), GIB).warnings
    assert warning == "deepseek-v3.2 takes sequences of 163840 tokens, not 163841."


def test_an_unknown_curve_is_refused_with_the_known_ones() -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"glm51.*got 'x'"):
        find_locality("x", "glm-5.2")
