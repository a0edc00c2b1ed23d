"""A worker's sizing: planned bytes are allocated bytes, refusals name a field, nothing stays."""

from __future__ import annotations

import gc
import os
import re
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, available, machine, tiny_dsa, tiny_v4, worker_config
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.models import load_geometry
from sparse_kvcm.sizing import Machine, SingleRank, allocate, measure, size_worker


def planned(sizing: Any) -> dict[str, int]:
    """The parts of a sizing that `measure` measures."""
    parts = {**sizing.device.fixed, "pools": sizing.device.pool_bytes}
    if sizing.host is not None:
        parts["host history"] = sizing.host.history_bytes
        parts["host cache"] = sizing.host.cold
    elif sizing.device.host_cache_bytes:
        parts["host cache"] = sizing.device.host_cache_bytes
    return parts


def check_refusal(message: str) -> None:
    fields = (
        "max_batch_size",
        "host_history_size",
        "host memory",
        "host_cache_size",
        "device budget",
        "gpu_cache_factor",
        "tokens_per_block",
        "kv_dtype",
        "max_seq_len",
        "kv_lora_rank",
        r"kv_lora_rank \+ qk_rope_head_dim",
        "head_dim",
        "head_dim - qk_rope_head_dim",
    )
    assert re.match(rf"\[\w+\] (the )?({'|'.join(fields)}) (of a [\w-]+ model )?must be ", message)
    assert "got " in message


GEOMETRIES = [
    tiny_dsa(),
    tiny_dsa(1, top_k=7),
    tiny_dsa(9, kv_lora_rank=56, qk_rope_head_dim=8),
    tiny_v4(),
    tiny_v4((4,)),
    tiny_v4((128, 4, 0, 4)),
]


@st.composite
def workers(draw: st.DrawFn, plenty: bool) -> tuple[Any, Any, Any]:
    """A configuration, a model and a machine, which has `plenty` of everything or anything."""
    longest = draw(st.sampled_from([1, 63, 64, 65, 128, 129, 1000, 2048]))
    geometry = draw(st.sampled_from(GEOMETRIES))
    sizes = st.sampled_from([24 * MIB, 48 * MIB]) if plenty else st.integers(1, 48 * MIB)
    dtypes, pages, factors = ["fp8", "bf16"], [None, None, 128, 256], [1, 1.5, 2, 4]
    if not plenty:
        dtypes += ["fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"]
        pages += [1, 3, 64, 384, 65_536]
        factors += [33, 1e9]
    config = worker_config(
        draw(st.integers(1, 9)) if plenty else draw(st.integers(1, 9) | st.just(1 << 20)),
        longest,
        {
            "gpu_cache_factor": draw(st.sampled_from(factors)),
            "host_history_size": draw(st.none() | sizes),
        },
        algorithm=geometry.algorithm,
        avg_seq_len=draw(st.none() | st.integers(1, longest)),
        index_dtype=draw(st.sampled_from(["fp8", "bf16", "mxfp4"])),
        dtype=draw(st.sampled_from(dtypes)),
        max_util_for_resume=draw(st.sampled_from([0.5, 0.97, 1.0] if plenty else [0.001, 0.97])),
        tokens_per_block=draw(st.sampled_from(pages)),
        host_cache_size=draw(st.none() | st.integers(1, 48 * MIB)),
    ).model_copy(update={"num_batches": draw(st.integers(1, 2))})
    host = GIB if plenty else draw(st.integers(1, 96 * MIB))
    budget = draw(st.integers(64 * MIB, 96 * MIB) if plenty else st.integers(1, 48 * MIB))
    memory = available(host)
    return config, geometry, machine(budget, memory)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workers(plenty=True))
def test_a_configuration_that_is_accepted_allocates_what_was_planned(
    worker: tuple[Any, Any, Any],
) -> None:
    config, geometry, where = worker
    sizing = size_worker(config, geometry, where)
    assert sizing.host is not None
    assert sizing.device.total_bytes <= where.device_budget
    assert sizing.host.pinned_bytes <= where.host.per_rank
    allocation = allocate(sizing)
    assert measure(allocation) == planned(sizing)
    assert len(allocation.batches) == len(allocation.engine) == config.num_batches
    manager = allocation.manager
    assert manager is not None
    # What the storage behind it maps: every pool in whole pages of the system.
    pools = [int(np.prod(manager.host_history(g).shape)) for g in range(manager.num_groups)]
    page = os.sysconf("SC_PAGESIZE")
    assert sum(pools) == sizing.host.history_bytes
    history = sum(-(-size // page) * page for size in pools)
    assert manager.storage.get_num_bytes(1) == history + sizing.host.cold
    assert manager.storage.get_num_bytes(0) == sizing.device.pool_bytes
    assert manager.memory_use() == kvcm.planned_memory(sizing.manager)
    assert allocation.storage is manager.storage
    requests = [
        manager.create_kv_cache(need=sizing.device.workload.max_units)
        for _ in range(sizing.device.batch)
    ]
    assert all(request.resume() for request in requests)  # a lease for each of max_batch_size
    longest = config.kv_cache_config.max_seq_len
    assert manager.storage.clamp_max_seq_len_for_mem(1, longest) == longest


@settings(max_examples=150, deadline=None)
@given(workers(plenty=False))
def test_a_configuration_is_accepted_or_refused_by_field(worker: tuple[Any, Any, Any]) -> None:
    config, geometry, where = worker
    try:
        sizing = size_worker(config, geometry, where)
    except kvcm.InvalidArgument as error:
        check_refusal(str(error))
        return
    assert sizing.device.total_bytes <= where.device_budget
    assert sizing.host is not None
    assert sizing.host.pinned_bytes <= where.host.per_rank


def test_pools_hold_the_longest_request_however_short_the_usual_one_is() -> None:
    longest = 1_000_000
    config = worker_config(2, longest, algorithm="deepseek_v4", avg_seq_len=1)
    allocation = allocate(size_worker(config, tiny_v4(), machine(128 * MIB)))
    assert allocation.storage.clamp_max_seq_len_for_mem(1, longest) == longest


def test_a_resident_worker_allocates_pools_and_tables_alone() -> None:
    resident = worker_config().model_dump() | {"sparse_attention_config": {"algorithm": "dsa"}}
    sizing = size_worker(WorkerConfig.model_validate(resident), tiny_dsa(), machine())
    assert sizing.host is None
    assert sizing.manager is None
    assert measure(allocate(sizing)) == planned(sizing)


def test_a_resident_worker_s_host_cache_is_pools_too() -> None:
    fields = worker_config(host_cache_size=5 * MIB).model_dump(exclude={"sparse_attention_config"})
    config = WorkerConfig.model_validate(fields | {"sparse_attention_config": {"algorithm": "dsa"}})
    sizing = size_worker(config, tiny_dsa(), machine())
    assert measure(allocate(sizing)) == planned(sizing)
    assert planned(sizing)["host cache"] == 6 * MIB
    with pytest.raises(kvcm.InvalidArgument, match="host_cache_size must be <= 6291455 B"):
        size_worker(config, tiny_dsa(), machine(host=available(6 * MIB - 1)))


def test_a_host_cache_leaves_less_for_history_and_over_the_limit_is_refused() -> None:
    memory = available(128 * MIB)
    with_cache = worker_config(1 << 10, 5000, host_cache_size=32 * MIB)
    sizing = size_worker(with_cache, tiny_dsa(), machine(GIB, memory))
    assert sizing.host is not None
    assert 31 * MIB < sizing.host.cold <= 32 * MIB
    assert sizing.host.total_bytes <= (128 * MIB - sizing.host.cold) // 2
    with pytest.raises(kvcm.InvalidArgument, match="host_cache_size must be <= 134217728 B"):
        size_worker(
            worker_config(3, 5000, host_cache_size=160 * MIB), tiny_dsa(), machine(GIB, memory)
        )


def test_the_way_back_from_tokens_is_capped_by_the_first_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens to quota and quota to tokens are no inverses; 10 times the quota came of it once."""

    class Poorer(SingleRank):
        def minimum(self, values: Sequence[int]) -> list[int]:
            return [value // 2 for value in values] if len(values) == 2 else list(values)

    module = sys.modules["sparse_kvcm.sizing.worker"]
    alone = size_worker(worker_config(), tiny_dsa(), machine())
    together = size_worker(worker_config(), tiny_dsa(), machine(), Poorer())
    assert together.device.pool_quota < alone.device.pool_quota
    monkeypatch.setattr(module, "quota_for_tokens", lambda device, tokens: 10 * device.pool_quota)
    capped = size_worker(worker_config(), tiny_dsa(), machine(), Poorer())
    assert capped.device.pool_quota == alone.device.pool_quota


@pytest.mark.parametrize("step", ["size_device", "pool_tokens", "quota_for_tokens", "size_host"])
def test_whatever_fails_in_sizing_is_told_to_the_other_ranks(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Others(SingleRank):
        def minimum(self, values: Sequence[int]) -> list[int]:
            return [value // 2 for value in values] if len(values) == 2 else list(values)

        def gather(self, message: str) -> list[str]:
            told.append(message)
            return [message]

    def fail(*arguments: Any, **named: Any) -> None:
        raise MemoryError(step)

    monkeypatch.setattr(sys.modules["sparse_kvcm.sizing.worker"], step, fail)
    with pytest.raises(MemoryError, match=step):
        size_worker(worker_config(), tiny_dsa(), machine(), Others())
    assert told[-1] == f"MemoryError: {step}"


def test_an_integrated_gpu_s_budget_is_not_counted_twice() -> None:
    memory = available(128 * MIB)
    for budget, fits in ((64 * MIB, True), (120 * MIB, False)):
        where = Machine(budget, host=memory, shares_host_memory=True)
        if fits:
            sizing = size_worker(worker_config(1 << 9, 5000), tiny_dsa(), where)
            assert sizing.host is not None
            assert sizing.host.total_bytes <= 32 * MIB
        else:
            with pytest.raises(kvcm.InvalidArgument, match="host memory must be >="):
                size_worker(worker_config(3, 5000), tiny_dsa(), where)


def test_a_batch_that_the_device_cannot_hold_names_the_one_that_fits() -> None:
    big = tiny_dsa(kv_lora_rank=512, qk_rope_head_dim=64)
    with pytest.raises(kvcm.InvalidArgument) as error:
        size_worker(worker_config(1000), big, machine(32 * MIB))
    message = str(error.value)
    assert "max_batch_size must be <= " in message
    assert "got 1000" in message
    assert "arena binds: lower gpu_cache_factor or raise the device budget" in message
    seats = int(message.split("max_batch_size must be <= ")[1].split()[0])
    fits = int(message.split("; ")[1].split(" requests fit")[0])
    sizing = size_worker(worker_config(seats), big, machine(32 * MIB))
    assert sizing.capacity.batch == fits < seats
    with pytest.raises(kvcm.InvalidArgument, match=f"<= {seats} "):
        size_worker(worker_config(seats + 1), big, machine(32 * MIB))


def test_a_budget_that_is_too_small_for_one_request_names_what_one_needs() -> None:
    with pytest.raises(kvcm.InvalidArgument) as error:
        size_worker(worker_config(1), tiny_dsa(), machine(1000))
    needed = int(str(error.value).split("the device budget must be >= ")[1].split()[0])
    size_worker(worker_config(1), tiny_dsa(), machine(needed))
    with pytest.raises(kvcm.InvalidArgument, match=f"must be >= {needed} B"):
        size_worker(worker_config(1), tiny_dsa(), machine(needed - 1))


def test_a_budget_of_the_configuration_lowers_the_machine_s() -> None:
    sizing = size_worker(worker_config(max_gpu_total_bytes="24MB"), tiny_dsa(), machine(64 * MIB))
    assert 20_000_000 < sizing.device.total_bytes <= 24_000_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"link_gb_s": 0}, "link_gb_s must be > 0 and finite, got 0"),
        ({"link_gb_s": float("nan")}, "link_gb_s must be .*, got nan"),
        ({"link_gb_s": -5}, "link_gb_s must be .*, got -5"),
        ({"link_gb_s": "50"}, "link_gb_s must be .*, got '50'"),
        ({"link_gb_s": True}, "link_gb_s must be .*, got True"),
        ({"compute_capability": 9.0}, "compute_capability must be two integers .*, got 9.0"),
        ({"compute_capability": (9,)}, "compute_capability must be two integers"),
        ({"compute_capability": (9, "0")}, "compute_capability must be two integers"),
        ({"device": 0}, "device must be a str, got 0"),
        ({"host": 1}, "host must be a .*HostMemory.*, got 1"),
        ({"shares_host_memory": 1}, "shares_host_memory must be a bool, got 1"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"\[Machine\] {message}"):
        Machine(GIB, **fields)


@pytest.mark.parametrize("budget", [-1, (1 << 60) + 1, 1e9, float("nan"), "1GB", True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"\[Machine\] device_budget must be an integer"):
        Machine(budget)


def test_more_requests_than_slots_have_numbers_are_refused_by_their_field() -> None:
    big = tiny_dsa(top_k=2048)
    plenty = available(1 << 60)
    with pytest.raises(kvcm.InvalidArgument, match=r"max_batch_size must be .*, got 1048576"):
        size_worker(worker_config(1 << 20, 32_928), big, machine(1 << 50, plenty))


def test_history_is_no_larger_than_its_pages_have_numbers() -> None:
    config = worker_config(3, 1000, {"host_history_size": 1 << 50})
    sizing = size_worker(config, tiny_dsa(), machine(host=available(1 << 60)))
    assert sizing.host is not None
    assert sizing.host.pages == (1 << 31) - 1


def test_regions_that_would_come_apart_on_the_gpu_are_refused_there_alone() -> None:
    config = worker_config(2, 512, algorithm="deepseek_v4", dtype="nvfp4", index_dtype="bf16")
    model = load_geometry("deepseek-v4-flash")
    size_worker(config, model, machine(GIB))
    attention = config.sparse_attention_config.model_copy(update={"enable_kv_cache_offload": False})
    resident = config.model_copy(update={"sparse_attention_config": attention})
    with pytest.raises(kvcm.InvalidArgument, match="pages of two sizes .* got nvfp4 and bf16"):
        size_worker(resident, model, machine(GIB))


def test_another_model_s_algorithm_is_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="algorithm must be deepseek_v4 .*, got dsa"):
        size_worker(worker_config(), tiny_v4(), machine())


def test_an_allocation_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["sparse_kvcm.sizing.allocate"]
    freed: list[bool] = []

    class Manager:
        storage = None

        def __init__(self, config: object) -> None:
            weakref.finalize(self, freed.append, True)

        def create_batch(self, max_rows: int, max_units: int) -> None:
            raise MemoryError("no batch")

    monkeypatch.setattr(module, "KvCacheManager", Manager)
    with pytest.raises(MemoryError, match="no batch"):
        allocate(size_worker(worker_config(), tiny_dsa(), machine()))
    gc.collect()
    assert freed == [True]


def test_host_history_is_capped_by_what_is_automatic() -> None:
    memory = available(GIB)  # of the machine; the configuration's ranks share it
    config = worker_config(1 << 16, 5000).model_copy(update={"local_ranks": 2})
    sizing = size_worker(config, tiny_dsa(), machine(40 * GIB, memory))
    assert sizing.host is not None
    assert sizing.host.total_bytes <= GIB // 4
    assert sizing.capacity.binding == "host history"
