"""The base manager: gates first, then the cache factor, sizes and memory, on all ranks alike."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, PLENTY, machine, tiny_dsa, tiny_v4, worker_config
from sparse_kvcm import base_manager
from sparse_kvcm.base_manager import BaseKvCacheManager
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.sizing import Machine, SingleRank, measure

OLD = Machine(64 * MIB, "cuda:0", (7, 5), PLENTY)
UNKNOWN = Machine(64 * MIB, "cuda:0", None, PLENTY)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be sized or allocated."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a gate came too late")

    module = sys.modules["sparse_kvcm.sizing.allocate"]
    for name in ("Storage", "KvCacheManager"):
        monkeypatch.setattr(module, name, fail)
    for name in ("resolve_auto", "size_worker", "allocate"):
        monkeypatch.setattr(base_manager, name, fail)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("changes", "where", "error", "message"),
    [
        ({"cache_transceiver_config": None}, machine(), NotImplementedError, "disaggregated gen"),
        ({"generation_only": False}, machine(), kvcm.InvalidArgument, "generation_only must be"),
        ({"max_beam_width": 2}, machine(), kvcm.InvalidArgument, "max_beam_width must be 1"),
        ({"max_draft_len": 1}, machine(), kvcm.InvalidArgument, "max_draft_len must be 0"),
        ({"pipeline_parallel_size": 2}, machine(), kvcm.InvalidArgument, "pipeline_parallel_size"),
        ({"enable_chunked_context": True}, machine(), kvcm.InvalidArgument, "chunked_context"),
        ({"max_draft_len": 1}, OLD, NotImplementedError, "capability must be >= 8.0 .*, got 7.5"),
        ({}, UNKNOWN, kvcm.InvalidArgument, "compute_capability must be given .* cuda:0, got None"),
    ],
)
def test_a_gate_refuses_before_anything_is_sized_or_allocated(
    changes: dict[str, Any], where: Machine, error: type[Exception], message: str
) -> None:
    config = worker_config().model_copy(update=changes)
    with pytest.raises(error, match=message):
        BaseKvCacheManager(config, tiny_dsa(), where)


def test_a_worker_that_does_not_offload_passes_the_gates() -> None:
    config = WorkerConfig.model_validate(
        {"sparse_attention_config": {"algorithm": "dsa"}, "max_beam_width": 2}
    )
    worker = BaseKvCacheManager(config, tiny_dsa(), machine())
    assert worker.allocation.manager is None
    assert worker.warmup().estimates_memory is True


@pytest.mark.parametrize("geometry", [tiny_dsa(), tiny_v4()])
def test_a_worker_has_the_memory_that_was_sized(geometry: Any) -> None:
    config = worker_config(3, 1000, algorithm=geometry.algorithm)
    worker = BaseKvCacheManager(config, geometry, machine())
    assert worker.config == config
    assert worker.sizing.host is not None
    assert measure(worker.allocation)["host history"] == worker.sizing.host.history_bytes
    assert [shape.num_requests for shape in worker.warmup([3]).shapes] == [3]


def test_auto_is_a_number_by_the_time_of_sizing() -> None:
    config = worker_config(3, 5000, {"gpu_cache_factor": "auto"})
    worker = BaseKvCacheManager(config, tiny_dsa(), machine(GIB))
    factor = worker.config.sparse_attention_config.kv_cache_offload_config.gpu_cache_factor
    assert factor == worker.sizing.device.workload.gpu_cache_factor >= 1


@pytest.mark.usefixtures("untouched")
def test_ranks_with_other_configurations_are_refused_instead_of_hanging() -> None:
    class Two(SingleRank):
        def gather(self, message: str) -> list[str]:
            return [message, "another" if message else ""]

    with pytest.raises(kvcm.InvalidArgument, match=r"same on every rank.* on ranks \[1\]"):
        BaseKvCacheManager(worker_config(), tiny_dsa(), machine(), Two())


def test_the_example_runs() -> None:
    result = doctest.testmod(base_manager)
    assert result.attempted > 0
    assert result.failed == 0
