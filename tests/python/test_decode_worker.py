"""What a decode-only worker warms up."""

from __future__ import annotations

import pytest

import sparse_kvcm as kvcm
from sizing_cases import worker_config
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.decode_worker import batch_buckets, bucket_for, plan_warmup


def resident(**changes: object) -> WorkerConfig:
    return WorkerConfig.model_validate({"sparse_attention_config": {"algorithm": "dsa"}, **changes})


def test_an_offloading_worker_warms_up_decode_steps_alone() -> None:
    plan = plan_warmup(worker_config(20, 1000))
    assert plan.estimates_memory is False
    assert [shape.num_requests for shape in plan.shapes] == [20, 16, 8, 4, 2, 1]
    assert {(s.new_tokens, s.history, s.capture_graph) for s in plan.shapes} == {(1, 999, True)}


def test_a_helix_worker_is_served_by_the_same_flag() -> None:
    helix = {"context_parallel": {"size": 2, "kind": "helix"}, "generation_only": True}
    plan = plan_warmup(resident(**helix))
    assert plan.estimates_memory is False
    assert all(shape.new_tokens == 1 for shape in plan.shapes)


def test_another_worker_estimates_and_runs_prefills_first() -> None:
    plan = plan_warmup(resident(kv_cache_config={"max_num_tokens": 600, "max_seq_len": 1000}))
    assert plan.estimates_memory is True
    assert [s.new_tokens for s in plan.shapes] == [600, 512, 64, 1, 1]
    assert [s.capture_graph for s in plan.shapes] == [False] * 4 + [True]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 16, 17, 100, 1500, 4096])
def test_buckets_ascend_end_at_the_most_and_waste_little(most: int) -> None:
    buckets = batch_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[0] == 1
    assert buckets[-1] == most
    for size in range(1, most + 1):
        bucket = bucket_for(size, buckets)
        assert size <= bucket
        assert bucket - size < max(8, bucket / 8)
    assert len(buckets) <= 8 + 8 * most.bit_length()


@pytest.mark.parametrize("size", [0, -1, 9])
def test_a_step_that_no_bucket_holds_is_refused(size: int) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"in \[1, 8\], got {size}"):
        bucket_for(size, [4, 8])


def test_buckets_outside_of_the_batch_are_refused() -> None:
    for buckets in ([], [0, 1], [4]):
        with pytest.raises(kvcm.InvalidArgument, match=r"buckets must be in \[1, max_batch_size 3"):
            plan_warmup(worker_config(3), buckets)
    with pytest.raises(kvcm.InvalidArgument, match="max_batch_size must be >= 1, got 0"):
        batch_buckets(0)
