"""Ranks in real processes decide together, or fail together."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from sparse_kvcm.sizing import OtherRankError, SingleRank, on_every_rank

torch = pytest.importorskip("torch")
PROCESS = Path(__file__).with_name("rank_process.py")
PATIENCE = 240  # seconds until a hang is one


def launch(world: int, scenario: str, folder: Path, backend: str = "gloo") -> list[tuple[int, Any]]:
    """Exit status and results of each rank."""
    store = str(folder / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), backend, str(rank), str(world), store, scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=PATIENCE)
            results.append((process.returncode, json.loads(output) if output else errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.fixture(
    scope="module",
    params=[("gloo", 2), ("gloo", 4), ("nccl", 2)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def scenarios(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results by scenario, then by rank."""
    backend, world = request.param
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"NCCL needs {world} GPUs, there are {torch.cuda.device_count()}")
    results = launch(world, "all", tmp_path_factory.mktemp("ranks"), backend)
    assert [status for status, _ in results] == [0] * world, results
    return list(zip(*(by_scenario for _, by_scenario in results), strict=True))


def test_ranks_with_unequal_memory_take_the_least(scenarios: Any) -> None:
    agreed = scenarios[0]
    assert all(result == agreed[0] for result in agreed[1:])
    assert agreed[0]["measured"] is True
    assert agreed[0]["device"] <= 1536 << 20  # what rank 0 has
    assert agreed[0]["pages"] * 64 * (48 + 48 + 144) <= 1 << 29  # half of what rank 1 has


def test_a_rank_that_cannot_makes_all_refuse(scenarios: Any) -> None:
    refused = scenarios[1]
    assert refused[1]["error"] == "InvalidArgument"
    assert "host memory must be" in refused[1]["message"]
    for rank, result in enumerate(refused):
        if rank != 1:
            assert result["error"] == "OtherRankError"
            assert "rank 1 failed: InvalidArgument: [size_host]" in result["message"]


def test_a_rank_that_raises_before_the_collective_hangs_nobody(scenarios: Any) -> None:
    raised = scenarios[2]
    assert raised[0] == {"error": "OSError", "message": "disk on fire"}
    for result in raised[1:]:
        assert result["error"] == "OtherRankError"
        assert "disk on fire" in result["message"]


def test_ranks_choose_one_cache_factor(scenarios: Any) -> None:
    chosen = scenarios[3]
    assert len({result["alone"] for result in chosen}) > 1
    assert {result["agreed"] for result in chosen} == {min(r["alone"] for r in chosen)}


def test_a_gate_that_closes_on_one_rank_closes_on_all(scenarios: Any) -> None:
    refused = scenarios[4]
    assert refused[1]["error"] == "NotImplementedError"
    for rank, result in enumerate(refused):
        if rank != 1:
            assert "rank 1 failed: NotImplementedError: [check_gates]" in result["message"]


def test_ranks_with_other_configurations_refuse_instead_of_waiting(scenarios: Any) -> None:
    for result in scenarios[5]:
        assert result["error"] == "InvalidArgument"
        assert "config must be the same on every rank" in result["message"]
        assert "on ranks [1]" in result["message"]


def test_ranks_go_on_after_failures(scenarios: Any) -> None:
    assert scenarios[6] == scenarios[0]


def test_a_rank_that_dies_is_an_error_of_the_others(tmp_path: Path) -> None:
    results = launch(2, "die", tmp_path)
    assert results[1][0] == 7
    status, result = results[0]
    assert status != 0 or "error" in result[0]


def test_a_single_rank_agrees_with_itself() -> None:
    ranks = SingleRank()
    assert ranks.minimum([3, 1]) == [3, 1]
    assert on_every_rank(ranks, lambda: 5) == 5
    with pytest.raises(KeyError):
        on_every_rank(ranks, lambda: {}["x"])


class Three(SingleRank):
    """Two others fail."""

    def gather(self, message: str) -> list[str]:
        return [message, "ValueError: no", "KeyError: x"]


def test_the_first_failure_of_others_is_named() -> None:
    with pytest.raises(OtherRankError, match="rank 1 failed: ValueError: no"):
        on_every_rank(Three(), lambda: 1)


def test_what_a_rank_made_goes_back_when_another_fails() -> None:
    class Memory:
        pass

    freed: list[bool] = []

    def work() -> Memory:
        memory = Memory()
        weakref.finalize(memory, freed.append, True)
        return memory

    with pytest.raises(OtherRankError) as kept:
        on_every_rank(Three(), work)
    assert freed == [True], kept  # although the exception is still there
