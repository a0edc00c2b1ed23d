"""Host history is made with progress, refused by name and given back when its making fails."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path

import pytest

import sparse_kvcm as kvcm
from factories import make_config

PAGES = 8000  # of 4 units with 64 + 48 B: 3.6 MB


def mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGESIZE")


class StopMakingError(Exception):
    pass


def test_progress_ascends_to_the_bytes_of_all_pools_on_this_thread() -> None:
    calls: list[tuple[int, int]] = []
    threads = set()

    def note(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.get_ident())

    manager = kvcm.KvCacheManager(make_config(host_pages=PAGES), progress=note)
    total = manager.memory_use().host_bytes
    done = [call[0] for call in calls]
    assert {call[1] for call in calls} == {total}
    assert len(calls) >= manager.num_groups
    assert done == sorted(done)
    assert done[-1] == total
    assert threads == {threading.get_ident()}


def test_progress_may_be_left_out_by_name() -> None:
    assert kvcm.KvCacheManager(make_config(), progress=None).num_groups == 2


def test_an_exception_in_progress_ends_the_construction_and_leaves_nothing() -> None:
    def fail(done: int, total: int) -> None:
        if done == total:
            raise StopMakingError(f"at {total}")

    config = make_config(host_pages=PAGES)
    total = kvcm.KvCacheManager(config).memory_use().host_bytes
    before = mapped_bytes()
    for _ in range(20):
        with pytest.raises(StopMakingError, match=f"at {total}"):
            kvcm.KvCacheManager(config, fail)
    assert mapped_bytes() < before + 5 * total


def test_progress_that_cannot_be_called_is_refused_by_name() -> None:
    with pytest.raises(kvcm.InvalidArgument) as caught:
        kvcm.KvCacheManager(make_config(), progress=7)  # type: ignore[arg-type]
    assert str(caught.value) == ("[KvCacheManager] progress must be callable or None, got int 7")


def test_memory_that_no_machine_has_is_a_memory_error_that_names_the_limit() -> None:
    layout = kvcm.UnitLayout([65536])
    config = make_config(
        groups=[kvcm.SelectionGroupConfig([0, 1], 4, layout)], host_pages=2**31 - 1
    )
    with pytest.raises(kvcm.HostMemoryError) as caught:
        kvcm.KvCacheManager(config)
    assert isinstance(caught.value, MemoryError)
    text = str(caught.value)
    assert text.startswith("[KvCacheManager] ")
    assert f"{(2**31 - 1) * 4 * 2 * 65536} B are wanted" in text
    assert "MemAvailable" in text or "control group" in text


def test_device_memory_that_no_machine_has_is_refused_by_the_part_that_wants_it() -> None:
    layout = kvcm.UnitLayout([65536])
    groups = [kvcm.SelectionGroupConfig([5], 4, layout)]
    with pytest.raises(kvcm.DeviceMemoryError) as caught:
        kvcm.KvCacheManager(make_config(groups=groups, arena_pages=2**29 - 2))
    assert isinstance(caught.value, MemoryError)
    assert str(caught.value).startswith(
        f"[KvCacheManager] the arena of layer 5 takes {(2**29 - 1) * 4 * 65536} B of device memory"
    )


def test_a_switch_that_is_not_understood_warns_where_the_manager_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARSE_KVCM_THP", "off")
    with pytest.warns(RuntimeWarning, match='SPARSE_KVCM_THP.* must be 0 or 1, got "off"') as seen:
        kvcm.KvCacheManager(make_config())
    assert [warning.filename for warning in seen] == [__file__]


def test_a_warning_made_an_error_leaves_no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_KVCM_THP", "off")
    config = make_config(host_pages=PAGES)
    before = mapped_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            with pytest.raises(RuntimeWarning, match="SPARSE_KVCM_THP"):
                kvcm.KvCacheManager(config)
    assert mapped_bytes() < before + 10 * 2**20


def test_no_switch_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in ("0", "1", ""):
            monkeypatch.setenv("SPARSE_KVCM_THP", value)
            kvcm.KvCacheManager(make_config(host_pages=PAGES))
