"""A storage and its requests under calls from many threads, and in a child of a fork."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

import sparse_kvcm as kvcm
from storage_configs import MIB, dense_layer, gpu_tier, host_tier, make_config

GPU, HOST = 0, 1
ROUNDS = 150


def make_storage(host: int) -> kvcm.Storage:
    return kvcm.Storage(
        make_config(
            [dense_layer(0, 4096), dense_layer(1, 4096, window=8)],
            cache_tiers=[gpu_tier(4 * MIB, 256 * MIB), host_tier(host, 1024 * MIB)],
            suspended=kvcm.BatchDesc([kvcm.KvCacheDesc(4000, 4000)]),
        )
    )


def test_calls_of_many_threads_take_turns() -> None:
    storage = make_storage(16 * MIB)
    shared = storage.create_request_pages()
    faults: list[BaseException] = []

    def use(request: kvcm.RequestPages, numbers: random.Random) -> None:
        length = numbers.randrange(1, 3000)
        try:
            if request.resize(length, length // 2):
                request.drop_step()
            if request.suspend():
                request.resume()
        except (kvcm.InvalidArgument, kvcm.InvalidState):
            pass  # another thread was before this one
        assert len(request.get_base_page_indices(0)) <= 750
        assert request.capacity >= 0

    def use_own(numbers: random.Random) -> None:
        request = storage.create_request_pages(100)
        use(request, numbers)
        request.close()

    def look(_numbers: random.Random) -> None:
        for pools in storage.pool_group_descs():
            assert all(pool.num_usable <= pool.num_slots for pool in pools)
        for level in (GPU, HOST):
            for group in storage.get_storage_statistics(level):
                assert group.total == group.available + group.unavailable
            assert storage.get_num_bytes(level) > 0
        storage.get_and_reset_statistics()
        storage.clamp_max_seq_len_for_mem(1, 1000)

    work: list[Callable[[random.Random], object]] = [
        lambda numbers: storage.resize(GPU, numbers.randrange(1, 256 * MIB)),
        lambda numbers: storage.resize(HOST, numbers.randrange(1, 256 * MIB)),
        lambda _numbers: [storage.wait_usable(HOST) for _ in range(1000)],
        lambda _numbers: storage.trim(),
        look,
        use_own,
        use_own,
        lambda numbers: use(shared, numbers),
        lambda numbers: use(shared, numbers),
    ]

    def run(call: Callable[[random.Random], object], seed: int) -> None:
        numbers = random.Random(seed)
        try:
            for _ in range(ROUNDS):
                call(numbers)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(call, seed)) for seed, call in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    shared.close()
    for level in (GPU, HOST):
        storage.wait_usable(level)
        for group in storage.get_storage_statistics(level):
            assert group.free == group.total


@pytest.mark.parametrize("filled", [False, True])
def test_a_child_of_a_fork_looks_and_lets_go(filled: bool) -> None:
    storage = make_storage(768 * MIB)
    if filled:
        storage.wait_usable(HOST)
        time.sleep(0.05)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            usable = [pool.num_usable for pools in storage.pool_group_descs() for pool in pools]
            storage.get_storage_statistics(HOST)
            try:
                storage.wait_usable(HOST)
                waited = True
            except kvcm.InvalidState:
                waited = False
            del storage
            code = 0 if usable and (waited or not filled) else 2
        finally:
            os._exit(code)
    for _ in range(2000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    storage.wait_usable(HOST)
