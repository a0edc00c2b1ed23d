"""Host memory: what may be pinned, floors, automatic and explicit sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, PLENTY, FakeSystem, available, small, tiny_dsa
from sparse_kvcm.models import load_geometry
from sparse_kvcm.sizing import (
    HostMemory,
    HostTerm,
    Workload,
    effective_available_host_memory,
    history_floor,
    host_memory,
    size_host,
)
from sparse_kvcm.sizing.buffers import batch_memory
from sparse_kvcm.sizing.host import cold_bytes, page_bytes


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    fake = FakeSystem(tmp_path)
    fake.available(100 * GIB)
    return fake


def test_a_machine_without_limits_gives_what_is_available(system: FakeSystem) -> None:
    memory = host_memory(limits=system.limits())
    assert memory.terms[HostTerm.AVAILABLE] == memory.effective == memory.per_rank == 100 * GIB
    assert memory.automatic == 50 * GIB


@pytest.mark.parametrize(("ranks", "share"), [(1, 100), (2, 50), (4, 25), (8, 12.5)])
def test_ranks_of_one_machine_divide_it(system: FakeSystem, ranks: int, share: float) -> None:
    memory = host_memory(ranks, limits=system.limits())
    assert memory.per_rank == share * GIB
    assert ranks * memory.automatic <= memory.effective // 2


def test_the_least_ancestor_binds_whichever_it_is(system: FakeSystem) -> None:
    system.group("/pod/job", limit=80 * GIB, used=0)
    system.group("/pod", limit=40 * GIB, used=8 * GIB)
    memory = host_memory(limits=system.limits())
    assert memory.effective == 32 * GIB
    assert memory.binding is HostTerm.GROUP
    assert memory.limit == "control group /pod"
    assert memory.terms[HostTerm.AVAILABLE] == 100 * GIB


def test_page_cache_of_a_group_counts_as_free(system: FakeSystem) -> None:
    system.group("/pod/job", limit=70 * GIB, used=69 * GIB, cache=68 * GIB)
    assert host_memory(limits=system.limits()).effective == 69 * GIB


def test_groups_of_version_1_bind_too_and_their_cache_is_free(system: FakeSystem) -> None:
    system.group_v1(limit=30 * GIB, used=25 * GIB, cache=5 * GIB)
    assert host_memory(limits=system.limits()).effective == 10 * GIB


def test_a_group_of_version_1_without_a_limit_does_not_bind(system: FakeSystem) -> None:
    system.group_v1(limit=(1 << 63) - 4096, used=25 * GIB)
    assert host_memory(limits=system.limits()).effective == 100 * GIB


def test_memlock_counts_at_four_fifths(system: FakeSystem) -> None:
    system.memlock(10 * GIB)
    memory = host_memory(limits=system.limits())
    assert memory.effective == 8 * GIB
    assert memory.binding is HostTerm.MEMLOCK
    assert memory.limit == "0.8 x RLIMIT_MEMLOCK"


def test_an_integrated_gpu_s_budget_is_no_longer_there_for_the_host(system: FakeSystem) -> None:
    memory = host_memory(2, limits=system.limits())
    assert memory.without(30 * GIB).effective == 40 * GIB
    assert memory.without(30 * GIB).per_rank == 20 * GIB
    assert memory.without(100 * GIB).effective == 0


def test_without_any_limit_that_can_be_read_nothing_is_pinned(tmp_path: Path) -> None:
    memory = host_memory(limits=FakeSystem(tmp_path).limits())
    assert memory.effective == memory.automatic == 0
    assert memory.binding is None
    with pytest.raises(kvcm.InvalidArgument, match="no limit that can be read"):
        size_host(small(1000), 1, memory)


def test_the_real_machine_has_terms_and_something_left() -> None:
    memory = host_memory()
    left = memory.terms[HostTerm.AVAILABLE]
    assert 0 < effective_available_host_memory() <= left + GIB


def test_no_ranks_are_refused() -> None:
    for ranks in (0, -1, 1.5, True):
        with pytest.raises(kvcm.InvalidArgument, match=f"local_ranks must be .* >= 1, got {ranks}"):
            HostMemory({}, ranks)  # type: ignore[arg-type]
    with pytest.raises(kvcm.InvalidArgument, match="local_ranks must be .* >= 1, got 0"):
        host_memory(0)


@pytest.mark.parametrize(
    "terms", [{"MemAvailable": 1}, {HostTerm.GROUP: -1}, {HostTerm.MEMLOCK: 1.5}]
)
def test_terms_that_are_none_are_refused(terms: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"\[HostMemory\] terms"):
        HostMemory(terms)


def test_floor_is_the_longest_request_at_its_utilisation_and_a_granule_per_pool() -> None:
    workload = small(640, max_util_for_resume=0.5)  # 10 pages, so 20
    groups = workload.geometry.groups
    # Rows: members x 36 B up to 16 B, 64 units a page.
    rows = [-(-36 * len(group) // 16) * 16 for group in groups]
    granules = sum(max(1, -(-20 * 64 * row // (2 * MIB))) for row in rows)
    assert history_floor(workload) == (granules + len(groups)) * 2 * MIB


def test_automatic_size_holds_the_batch_at_the_usual_length() -> None:
    for usual, pages in ((None, 16), (500, 8)):
        workload = small(1000, avg_seq_len=usual)
        sizing = size_host(workload, 7000, PLENTY)
        assert sizing.pages == 7000 * pages
        assert sizing.is_automatic


def test_automatic_size_stops_at_what_may_be_pinned_staging_included() -> None:
    workload = small(1000)
    memory = available(2 * history_floor(workload) + 200 * MIB)
    sizing = size_host(workload, 100_000, memory)
    most = memory.without(sizing.cold).automatic
    assert most - sizing.page_bytes < sizing.total_bytes <= most
    # Two chunks for 100,000 rows of 8 words and two tables of 16 pages; two reports of 3 words a
    # row and one.
    assert sizing.staging == 2 * (32 * MIB + (3 * 100_000 + 1) * 4)


def test_automatic_size_is_raised_to_the_floor() -> None:
    workload = small(1000)
    floor = history_floor(workload) + batch_memory(workload, 1).staging_bytes
    needed = floor + cold_bytes(workload, 100)
    sizing = size_host(workload, 1, available(needed))
    assert floor - page_bytes(workload) < sizing.total_bytes <= floor
    assert sizing.pinned_bytes <= needed
    with pytest.raises(kvcm.InvalidArgument, match=f"host memory must be >= {needed} B"):
        size_host(workload, 1, available(needed - 1))


def test_pages_of_suspended_requests_come_off_first_and_grow_with_the_granules() -> None:
    workload = small(1000, host_cache_size=3 * MIB)
    assert size_host(workload, 1, PLENTY).cold <= 4 * MIB
    sizing = size_host(workload, 1, PLENTY, host_history_size=33 * GIB)
    assert 4 * MIB < sizing.cold <= 32 * MIB
    most = PLENTY.without(sizing.cold).per_rank
    assert size_host(workload, 1, PLENTY, host_history_size=most).pinned_bytes <= 64 * GIB
    with pytest.raises(kvcm.InvalidArgument, match=f"host_history_size must be <= {most} B"):
        size_host(workload, 1, PLENTY, host_history_size=most + 1)


def test_less_than_the_floor_is_a_refusal_not_a_fall_back() -> None:
    workload = small(1000)
    for left in (0, history_floor(workload)):
        with pytest.raises(kvcm.InvalidArgument, match=r"host memory must be >= \d+ B .*MemAvail"):
            size_host(workload, 1, available(left))


def test_explicit_size_below_the_floor_names_the_size_needed() -> None:
    workload = small(1000)
    floor = history_floor(workload) + batch_memory(workload, 2).staging_bytes
    assert size_host(workload, 2, PLENTY, host_history_size=floor).floor == floor
    with pytest.raises(kvcm.InvalidArgument) as error:
        size_host(workload, 2, PLENTY, host_history_size=floor - 1)
    message = f"host_history_size must be >= {floor} B"
    assert message in str(error.value)
    assert f"got {floor - 1}" in str(error.value)


def test_explicit_size_over_the_limit_names_the_limit(system: FakeSystem) -> None:
    system.group("/pod/job", limit=GIB, used=0)
    memory = host_memory(2, limits=system.limits())
    with pytest.raises(kvcm.InvalidArgument, match="<= 536870912 B.*control group /pod/job"):
        size_host(small(1000), 1, memory, host_history_size=GIB)


def test_a_low_memlock_says_what_raises_it(system: FakeSystem) -> None:
    system.memlock(64 << 10)
    for size in (None, 64 * MIB):
        with pytest.raises(kvcm.InvalidArgument, match="ulimit -l"):
            size_host(small(1000), 1, host_memory(limits=system.limits()), host_history_size=size)


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v4-flash", "deepseek-v3.2"])
def test_floor_of_a_real_model_is_its_history_and_little_more(model: str) -> None:
    workload = Workload(load_geometry(model), 131_072)
    history = workload.pages(131_072) * page_bytes(workload)
    pools = len(workload.geometry.groups)
    assert history / 0.97 + pools * 2 * MIB <= history_floor(workload)
    assert history_floor(workload) <= history / 0.97 + 2 * pools * 32 * MIB + GIB // 8


def test_a_floor_of_more_pages_than_have_numbers_is_refused_by_the_length() -> None:
    geometry = tiny_dsa(max_position_embeddings=1 << 24)
    workload = small(
        (1 << 24) - 1, geometry=geometry, tokens_per_block=1, max_util_for_resume=0.001
    )
    with pytest.raises(
        kvcm.InvalidArgument, match=r"\[size_host\] max_seq_len must be .*, got 1677"
    ):
        history_floor(workload)


def test_floor_is_of_the_sparse_layers_alone() -> None:
    assert history_floor(small(1000, index_dtype="bf16")) == history_floor(small(1000))
    assert history_floor(small(1000, geometry=tiny_dsa(2))) < history_floor(small(1000))
