"""After any order of operations everything that was taken is free again."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

import snapshot
import sparse_kvcm as kvcm
from factories import history, make_config

MAX_ROWS = 5


class Life:
    """Requests and one Batch under random operations, refusals included."""

    def __init__(self, manager: kvcm.KvCacheManager, seed: int) -> None:
        self.manager, self.rng = manager, random.Random(seed)
        self.batch = manager.create_batch(MAX_ROWS, 300)
        self.requests: list[kvcm.KvCache] = []
        self.done: dict[str, int] = {}
        self.refused = 0

    def operate(self) -> None:
        weights = {
            "create": 3,
            "drop": 1,
            "resume": 4,
            "suspend": 2,
            "close": 2,
            "import": 3,
            "add": 5,
            "remove": 1,
            "resize": 5,
            "publish": 4,
            "launch": 6,
            "record": 5,
            "abort": 2,
            "new_batch": 0.05,
        }
        name = self.rng.choices(list(weights), list(weights.values()))[0]
        try:
            getattr(self, name)()
            self.done[name] = self.done.get(name, 0) + 1
        except (kvcm.InvalidState, kvcm.OutOfPages, kvcm.InvalidArgument):
            self.refused += 1

    def one(self) -> kvcm.KvCache:
        if not self.requests:
            self.create()
        return self.rng.choice(self.requests)

    def create(self) -> None:
        if len(self.requests) < 9:
            need = self.rng.choice([1, 9, 12, 40, 150, 300])
            self.requests.append(self.manager.create_kv_cache(need))

    def drop(self) -> None:
        self.requests.remove(self.one())

    def resume(self) -> None:
        self.one().resume()

    def suspend(self) -> None:
        self.one().suspend()

    def close(self) -> None:
        cache = self.one()
        cache.close()
        self.requests.remove(cache)

    def add(self) -> None:
        self.batch.add(self.one(), self.rng.choice([None, self.rng.randrange(-1, MAX_ROWS)]))

    def remove(self) -> None:
        self.batch.remove(self.one())

    def resize(self) -> None:
        rows = {cache.row: cache for cache in self.requests if cache.row is not None}
        self.batch.resize(
            {row: cache.committed_length + self.rng.randint(0, 2) for row, cache in rows.items()}
        )

    def publish(self) -> None:
        self.batch.publish()
        self.batch.wait_ready()

    def launch(self) -> None:
        rows = np.array(self.rng.sample(range(MAX_ROWS), 3), np.int32)
        selection = np.array([[self.rng.randint(-1, 60) for _ in range(4)] for _ in rows], np.int32)
        for group in (0, 1):
            self.batch.fetch(group, rows, self.batch.resolve(group, rows, selection))

    def record(self) -> None:
        rows = [cache.row for cache in self.requests if cache.row is not None]
        try:
            self.batch.record_read(rows)
        except kvcm.InvalidArgument:  # a row that joined during the step
            self.batch.record_read([])
        self.batch.take_errors()

    def abort(self) -> None:
        self.batch.abort_step()

    def new_batch(self) -> None:
        self.batch.close()
        self.batch = self.manager.create_batch(MAX_ROWS, 300)


def import_history(self: Life) -> None:
    cache = self.one()
    first, count = cache.committed_length, self.rng.randint(0, 40)
    cache.import_history(history(self.manager, 1, first, first + count))


setattr(Life, "import", import_history)  # a keyword, so not by def


def live(manager: kvcm.KvCacheManager, seed: int) -> Life:
    """10,000 operations that went through."""
    print("seed", seed)
    life = Life(manager, seed)
    while sum(life.done.values()) < 10_000:
        life.operate()
    print(life.done, "refused", life.refused)
    return life


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("end", ["close", "suspend", "drop", "batch first"])
def test_everything_is_free_after_10000_operations(end: str, seed: int) -> None:
    manager = kvcm.KvCacheManager(make_config(host_pages=90))
    fresh = snapshot.of_manager(manager)
    life = live(manager, seed)
    if end == "batch first":
        life.batch.close()
    elif end == "suspend":
        if life.batch.step_open:
            life.batch.abort_step()
        for cache in life.requests:
            with contextlib.suppress(kvcm.OutOfPages):
                cache.suspend()
    if end != "drop":
        for cache in life.requests:
            cache.close()
    life.requests.clear()
    if life.batch.step_open:
        life.batch.record_read([])  # pages of requests that closed in the step return now
    after = snapshot.of_manager(manager)
    changed = [n for n in snapshot.differences(fresh, after) if n not in ("arenas", "hosts")]
    assert changed == []


def test_all_rows_of_a_batch_are_free_again_after_10000_operations() -> None:
    manager = kvcm.KvCacheManager(make_config(arena_pages=30, max_leases=9))
    life = live(manager, seed=3)
    life.requests.clear()
    if life.batch.step_open:
        life.batch.record_read([])
    for row in range(MAX_ROWS):
        life.requests.append(manager.create_kv_cache(10))
        assert life.requests[-1].resume()
        assert life.batch.add(life.requests[-1]) == row
