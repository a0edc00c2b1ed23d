"""No call keeps other Python threads waiting while it waits for the manager's lock."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sparse_kvcm as kvcm
from factories import history, make_config


@pytest.fixture
def no_switches() -> Iterator[None]:
    """A thread loses the GIL only where it lets it go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


def make_request(manager: kvcm.KvCacheManager) -> Any:
    return manager.create_kv_cache(8)


def make_batch(manager: kvcm.KvCacheManager) -> Any:
    return manager.create_batch(1, 8)


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize("make", [make_request, make_batch])
def test_what_is_dropped_closes_without_the_gil(
    make: Callable[[kvcm.KvCacheManager], Any],
) -> None:
    manager = kvcm.KvCacheManager(make_config(host_pages=4096))
    units = history(manager, 1, 0, 8192)
    stop = threading.Event()
    ticks = 0

    def hold_the_lock() -> None:
        while not stop.is_set():
            cache = manager.create_kv_cache(8192)
            cache.import_history(units)
            cache.close()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    threads = [threading.Thread(target=target) for target in (hold_the_lock, tick)]
    for thread in threads:
        thread.start()
    others_ran = False
    for _ in range(1000):
        dropped = [make(manager)]
        time.sleep(0)
        before = ticks
        dropped.clear()
        others_ran = ticks != before
        if others_ran:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert others_ran
