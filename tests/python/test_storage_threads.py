"""Other threads run Python while a storage's host memory is made, changed or waited for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import sparse_kvcm as kvcm
from storage_configs import MIB, dense_layer, gpu_tier, host_tier, make_config

HOST = 1


@pytest.fixture(autouse=True)
def never_interrupted() -> Iterator[None]:
    """No thread loses the GIL unless it lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def runs_meanwhile(work: Callable[[], object]) -> bool:
    """Whether a thread that was waiting to run has run during `work`."""
    ran: list[bool] = []
    begin = threading.Event()

    def other() -> None:
        begin.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    begin.set()
    work()
    result = bool(ran)
    thread.join()
    return result


def config(host: int, max_host: int = 0) -> kvcm.StorageConfig:
    return make_config(
        [dense_layer(0, 4096)], cache_tiers=[gpu_tier(MIB), host_tier(host, max_host)]
    )


def test_storage_is_made_and_shrunk_without_the_gil() -> None:
    made: list[kvcm.Storage] = []
    at_once = kvcm.StorageFill.AT_ONCE
    assert runs_meanwhile(lambda: made.append(kvcm.Storage(config(512 * MIB), at_once)))
    storage = made[0]

    def shrink_and_grow() -> None:  # how long it takes depends on how far it has been filled
        storage.resize(HOST, 1)
        storage.resize(HOST, 512 * MIB)

    assert any(runs_meanwhile(shrink_and_grow) for _ in range(100))
    assert not runs_meanwhile(lambda: storage.config)


def test_progress_ascends_to_the_end_and_what_it_raises_ends_the_work() -> None:
    calls: list[tuple[int, int]] = []
    storage = kvcm.Storage(
        config(256 * MIB), kvcm.StorageFill.AT_ONCE, lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (256 * MIB, 256 * MIB)
    statistics = storage.get_storage_statistics(HOST)[0]
    assert statistics.free == statistics.total

    def stop(_done: int, _total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        kvcm.Storage(config(256 * MIB), kvcm.StorageFill.AT_ONCE, stop)


def test_many_threads_may_wait_while_a_tier_changes() -> None:
    storage = kvcm.Storage(config(8 * MIB, 256 * MIB))
    stop = threading.Event()
    faults: list[BaseException] = []

    def wait() -> None:
        try:
            while not stop.is_set():
                storage.wait_usable(HOST)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(40):
        storage.resize(HOST, (1 + i * 37 % 256) * MIB)
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    storage.wait_usable(HOST)
    statistics = storage.get_storage_statistics(HOST)[0]
    assert statistics.free == statistics.total
