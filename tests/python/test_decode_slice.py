"""The decode-slice benchmark on tiny models: both sides compute the same, and the command reports.

On a CPU everything but the GPU's kernels, streams and graphs runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sparse_kvcm as kvcm  # noqa: E402
from benchmarks.decode_slice import __main__ as command  # noqa: E402
from benchmarks.decode_slice import fetch_probe, measure, report  # noqa: E402
from benchmarks.decode_slice.attention import merge  # noqa: E402
from benchmarks.decode_slice.budget import Budget  # noqa: E402
from benchmarks.decode_slice.cache import SliceCache  # noqa: E402
from benchmarks.decode_slice.clock import Clock  # noqa: E402
from benchmarks.decode_slice.forward import OVERLAPS  # noqa: E402
from benchmarks.decode_slice.measure import Run  # noqa: E402
from benchmarks.decode_slice.model import make_slice  # noqa: E402
from benchmarks.decode_slice.sweeps import SWEEPS, lines_of  # noqa: E402
from benchmarks.decode_slice.weights import Weights  # noqa: E402
from benchmarks.traces import PRESETS, DriftTraces  # noqa: E402

OUTPUT = 40
RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/decode_slice.json"
RUNS = json.loads(RESULTS.read_text())["runs"]
MODELS = ["tiny", "tiny-v4"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outputs(name: str, mode: Any, steps: int = 9, overlap: Any = "none") -> list[list[Any]]:
    model = make_slice(name)
    prompt = 130 * model.geometry.tokens_per_unit - 3
    cache = SliceCache(model, mode, 8, prompt + OUTPUT, 2.0, "cpu")
    run = Run(prompt, warm_up=2, steps=20, overlap=overlap)
    return measure.attention_outputs(cache, Weights(model, "cpu", "bf16"), 5, run, steps)


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_both_sides_is_equal_bit_by_bit(name: str) -> None:
    resident, offloaded = (outputs(name, mode) for mode in ("resident", "offloaded"))
    assert len(resident) == 9
    for step, layers in enumerate(resident):
        assert len(layers) == make_slice(name).layers
        for layer, expected in enumerate(layers):
            assert torch.equal(offloaded[step][layer][:5], expected[:5]), (step, layer)
            assert expected[:5].isfinite().all()
            assert expected[:5].float().std() > 0.01


@pytest.mark.parametrize("name", MODELS)
def test_requests_attend_to_histories_of_their_own(name: str) -> None:
    first = outputs(name, "offloaded", steps=1)[0][0]
    assert not any(torch.equal(first[0], first[i]) for i in range(1, 5))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overlap", ["halves", "hits"])
def test_what_overlaps_computes_the_same_up_to_rounding(name: str, overlap: str) -> None:
    """In the first layer: behind it, roundings to FP8 make more of a difference in a last bit."""
    plain, other = (outputs(name, "offloaded", 4, how) for how in ("none", overlap))
    for step in range(4):
        rows = [kept[step][0][:5] for kept in (other, plain)]
        torch.testing.assert_close(*rows, rtol=0.02, atol=0.02)


def check(name: str) -> None:
    arguments = ["--model", name, "--device", "cpu", "--output", "40", "--prompt", "520"]
    arguments += ["--warm-up", "2", "--steps", "4", "--check", "--overlap", ",".join(OVERLAPS)]
    options = command.parse(arguments)
    model = make_slice(name)
    command.check(
        model, Weights(model, "cpu", "bf16"), command.make_run(model, options), options
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_command_checks_all_overlaps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(OVERLAPS)
    assert sum("bit by bit" in line for line in lines) == 4


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_check_of_a_merge_that_weighs_wrong_fails(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.decode_slice.forward.merge", lambda *parts: factor * merge(*parts)
    )
    with pytest.raises(RuntimeError, match=r"\[check\] hits, step 0, layer 0: outputs differ"):
        check("tiny")


def test_merged_parts_are_attention_over_both() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2, 10, generator=random)
    scores[0, :, :4], scores[1, :, 4:] = -torch.inf, -torch.inf
    values = torch.randn(3, 10, 8, generator=random)

    def attend(some: slice) -> tuple[Any, Any]:
        sums = scores[..., some].logsumexp(-1)
        weights = (scores[..., some] - sums[..., None]).exp().nan_to_num(0.0)
        return torch.einsum("bhk,bkd->bhd", weights, values[:, some]), sums

    got = merge(attend(slice(0, 4)), attend(slice(4, 10)))
    torch.testing.assert_close(got, attend(slice(0, 10))[0])


def test_requests_as_long_as_a_lease_never_fetch() -> None:
    options = command.parse(["--model", "tiny", "--fit-lease", "--output", "40", "--warm-up", "3",
                             "--steps", "5", "--device", "cpu"])  # fmt: skip
    model = make_slice("tiny")
    run = command.make_run(model, options)
    cache = SliceCache(model, "offloaded", 2, run.prompt + 40, 2.0, "cpu")
    assert run.prompt + 40 == cache.sizes.lease_slots
    record = measure.run_point(cache, Weights(model, "cpu", "bf16"), 2, run)
    assert record["misses_per_step"] == 0
    assert record["hit_rate"] == 1


def test_a_point_counts_what_resolve_missed_and_leaves_the_cache_empty() -> None:
    model = make_slice("tiny")
    cache = SliceCache(model, "offloaded", 3, 340, 2.0, "cpu")
    weights = Weights(model, "cpu", "bf16")
    run = Run(300, warm_up=3, steps=5)
    record = measure.run_point(cache, weights, 3, run)
    share = record["misses_per_step"] / (2 * 3 * model.geometry.top_k)
    assert 0.01 < share < 0.5
    assert record["hit_rate"] == pytest.approx(1 - share)
    # Groups of 2 and 4 layers: rows of 160 and 320 bytes.
    bytes_per_miss = record["fetch_bytes_per_step"] / record["misses_per_step"]
    assert 160 < bytes_per_miss < 320
    assert cache.manager.occupancy().free_leases == 3
    assert cache.rows == []
    again = measure.run_point(cache, weights, 3, run)
    assert again["misses_per_step"] == record["misses_per_step"]


@pytest.mark.parametrize("overlap", ["none", "followers"])
def test_a_rate_is_that_of_a_fetch_that_is_timed_whole(overlap: Any) -> None:
    model = make_slice("tiny")
    cache = SliceCache(model, "offloaded", 1, 300 + OUTPUT, 2.0, "cpu")
    run = Run(300, warm_up=2, steps=2, overlap=overlap)
    record = measure.run_point(cache, Weights(model, "cpu", "bf16"), 1, run)
    assert record["fetch_bytes_per_step"] > 0
    assert ("fetch_gb_s" in record) == (overlap == "none")


def test_no_committed_fetch_is_faster_than_the_link() -> None:
    rates = [(one["fetch_gb_s"], one["link_gb_s"]) for one in RUNS if "fetch_gb_s" in one]
    assert rates
    assert all(rate < link for rate, link in rates)


@pytest.mark.parametrize("preset", PRESETS)
def test_traces_select_distinct_units_below_the_length_and_the_newest(preset: str) -> None:
    traces = DriftTraces(PRESETS[preset], 3, 50, 16, seed=1)
    for length in ([20, 7, 50], [21, 8, 50]):
        selection = traces.step(torch.tensor(length))
        assert selection.dtype == torch.int32
        for row, n in zip(selection.tolist(), length, strict=True):
            units = [unit for unit in row if unit >= 0]
            assert len(units) == len(set(units)) == min(16, n)
            assert n - 1 in units
            assert max(units) < n


def test_a_calm_trace_overlaps_more_than_a_restless_one() -> None:
    shares = {}
    for preset in ("calm", "restless", "v32_first"):
        traces = DriftTraces(PRESETS[preset], 1, 4096, 256, seed=2)
        steps = [set(traces.step(torch.tensor([4000 + i]))[0].tolist()) for i in range(6)]
        shares[preset] = len(steps[4] & steps[5]) / 256
    assert shares["calm"] > 0.8 > shares["restless"] > 0.2 > shares["v32_first"]


def test_the_command_writes_records_in_the_place_of_older_ones(tmp_path: Path) -> None:
    target = tmp_path / "slice.json"
    arguments = ["--model", "tiny", "--batches", "1,2", "--output", "40", "--warm-up", "2",
                 "--steps", "4", "--json", str(target)]  # fmt: skip
    command.main([*arguments, "--check", "--plot", str(tmp_path)])
    command.main([*arguments, "--modes", "offloaded"])
    written = json.loads(target.read_text())
    runs = [(one["mode"], one["batch"]) for one in written["runs"]]
    assert runs == [("offloaded", 1), ("offloaded", 2), ("resident", 1), ("resident", 2)]
    assert {"step_ms", "step_ms_p99", "phases_ms", "hit_rate", "command"} <= set(written["runs"][0])
    assert [one["mode"] for one in written["peaks"]] == ["offloaded", "resident"]
    assert written["peaks"][0]["over_resident"] > 0
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_turns_alternate_and_the_middle_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, steps = [], iter([9.0, 1.0, 2.0, 8.0, 7.0, 3.0])  # the first is a side's slowest

    def run_point(cache: SliceCache, weights: Any, n: int, run: Run) -> dict[str, Any]:
        order.append(cache.mode)
        return {"batch": n, "step_ms": next(steps), "step_ms_p99": 9.0, "host_ms": 0.0,
                "tokens_per_s": 1.0, "phases_ms": {}, "hit_rate": 1.0, "seconds": {}}  # fmt: skip

    monkeypatch.setattr(command.measure, "run_point", run_point)
    target = tmp_path / "slice.json"
    command.main(["--model", "tiny", "--batches", "1", "--output", "40", "--warm-up", "2",
                  "--steps", "4", "--turns", "3", "--json", str(target)])  # fmt: skip
    assert order == ["resident", "offloaded"] * 3
    offloaded, resident = json.loads(target.read_text())["runs"]
    assert resident["step_ms"] == 7.0
    assert resident["turns_ms"] == [9.0, 2.0, 7.0]
    assert offloaded["step_over_resident"] == 3.0 / 7.0


def test_a_sweep_runs_its_lines_and_makes_weights_once_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "slice.json"
    command.main(["--sweep", "tiny", "--json", str(target)])
    runs = json.loads(target.read_text())["runs"]
    found = sorted((one["model"], one["mode"], one["batch"]) for one in runs)
    assert found == [
        ("tiny", "offloaded", 1), ("tiny", "offloaded", 2), ("tiny", "resident", 1),
        ("tiny-v4", "offloaded", 1), ("tiny-v4", "resident", 1),
    ]  # fmt: skip
    assert runs[0]["command"].startswith("scripts/bench_slice --model tiny --modes offloaded")
    assert {"admit", "inputs", "compile", "steps"} == set(runs[0]["seconds"])
    assert capsys.readouterr().out.count("weights in") == 2


def test_a_probe_of_fetches_names_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    fetch_probe.main(["--model", "tiny", "--factor", "2", "--batch", "3", "--prompt", "400",
                      "--device", "cpu"])  # fmt: skip
    table = capsys.readouterr().out
    assert all(name in table for name in ("again", "nothing", "l2", "weights"))


@pytest.mark.parametrize("name", SWEEPS)
def test_lines_of_a_sweep_are_commands(name: str) -> None:
    for line in lines_of(name):
        options = command.parse(line.split())
        command.make_run(make_slice(options.model, options.layers), options)
    assert set(lines_of(name)) <= {*lines_of("all"), *SWEEPS["tiny"]}


def test_layers_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="must be whole selection groups"):
        make_slice("glm-5.2", 6)
    assert make_slice("glm-5.2", 12).geometry.groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert make_slice("v4-flash").geometry.compress_ratios == (4, 128) * 6


@pytest.mark.parametrize("name", ["glm-5.2", "v32", "v4-flash"])
@pytest.mark.parametrize(("prompt", "factor"), [(32_768, 2.0), (131_072, 4.0)])
def test_a_budget_holds_what_the_planner_says(name: str, prompt: int, factor: float) -> None:
    """But for buffers of an engine that the planner counts, 0.3 % of a request."""
    pytest.importorskip("pydantic")
    from sparse_kvcm.sizing.capacity import find_capacity
    from sparse_kvcm.sizing.workload import Workload

    model = make_slice(name)
    budget = Budget(model, prompt + 160, factor, "cpu")
    workload = Workload(
        model.geometry, prompt + 160, "fp8", tokens_per_block=model.tokens_per_block,
        gpu_cache_factor=factor,
    )  # fmt: skip
    for mode in ("resident", "offloaded"):
        planned = find_capacity(workload, model.budget, offload=mode == "offloaded").batch
        got = budget.largest_batch(mode)
        assert planned <= got <= planned + 1 + planned // 300


def test_buckets_are_those_of_a_worker() -> None:
    pytest.importorskip("pydantic")
    from sparse_kvcm.decode_worker import batch_buckets, bucket_for

    for most in (1, 5, 8, 100, 1314):
        for n in range(1, most + 1):
            assert measure.bucket_of(n, most) == bucket_for(n, batch_buckets(most))


def test_offload_is_compared_with_as_many_resident_requests() -> None:
    common = {"model": "tiny", "layers": 6, "prompt": 1, "experts": "bf16, 4 of 8",
              "trace": "glm51"}  # fmt: skip
    resident = [common | {"mode": "resident", "batch": b, "step_ms": b / 4} for b in (8, 16)]
    for batch, expected in ((16, 1.5), (24, None)):
        one = common | {"mode": "offloaded", "batch": batch, "step_ms": 6.0}
        report.predict(one, resident)
        assert one.get("step_over_resident") == expected


# --- on a GPU ---


@pytest.fixture
def gpu() -> str:
    if kvcm.cuda_is_available() and torch.cuda.is_available():
        return "cuda:0"
    if os.environ.get("SPARSE_KVCM_REQUIRE_CUDA"):
        pytest.fail("SPARSE_KVCM_REQUIRE_CUDA is set and there is no GPU")
    pytest.skip("no GPU")


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_experts_of_a_gpu_are_those_of_a_loop(dtype: str, gpu: str) -> None:
    """FP8 up to the rounding of inputs, 2^-4 of each."""
    model = make_slice("tiny")
    experts = Weights(model, gpu, dtype).layers[0].experts
    assert experts is not None
    x = torch.randn(40, model.hidden, device=gpu, dtype=torch.bfloat16)
    router = torch.randn(model.hidden, model.local_experts, device=gpu, dtype=torch.bfloat16)
    got = experts(x, router, 2).float().cpu()
    plain = [experts.up.float(), experts.down.float()]
    for weights, scale in zip(plain, (experts.up_scale, experts.down_scale), strict=True):
        if scale is not None:
            weights.mul_(scale[..., None])
    chosen = (x @ router).float().sigmoid().topk(2)
    share = chosen.values / chosen.values.sum(-1, keepdim=True)
    expected = torch.zeros(40, model.hidden)
    for token in range(40):
        for expert, part in zip(chosen.indices[token].tolist(), share[token].cpu(), strict=True):
            gate, up = (plain[0][expert] @ x[token].float()).chunk(2)
            out = plain[1][expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += part * out.cpu()
    error = (got - expected).norm() / expected.norm()
    assert error < (0.08 if dtype == "fp8" else 0.02)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overlap", ["none", "side", "followers", "layers", "halves", "hits"])
def test_a_captured_step_computes_what_an_eager_one_does(name: str, overlap: Any, gpu: str) -> None:
    """Two caches through the same steps, one of which replays a graph."""
    model = make_slice(name)
    prompt = 130 * model.geometry.tokens_per_unit
    weights = Weights(model, gpu, "bf16")
    run = Run(prompt, warm_up=2, steps=20, overlap=overlap)
    points = [
        measure.Point(SliceCache(model, "offloaded", 8, prompt + OUTPUT, 2.0, gpu), weights, 5, run)
        for _ in range(2)
    ]
    replay = None
    for step in range(8):
        points[0].step(lambda: points[0].forward.run(Clock()))
        if step < 2:
            points[1].step(lambda: points[1].forward.run(Clock()))
        else:
            replay = replay or points[1].capture(Clock())
            points[1].step(replay)
        results = [point.forward.output[:5] for point in points]
        assert torch.equal(*results), step
    missed = [point.forward.misses for point in points]
    assert torch.equal(*missed)
    assert int(missed[0].sum()) > 0
