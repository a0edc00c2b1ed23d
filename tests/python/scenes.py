"""Scenes in which calls are refused, and the check that a refused call has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import snapshot
import sparse_kvcm as kvcm
from factories import history, int32, make_config


class Scene:
    """A manager with a seated request of 40 units in row 1, a suspended and a closed one."""

    def __init__(self) -> None:
        self.manager = kvcm.KvCacheManager(make_config())
        self.batch = self.manager.create_batch(3, 200)
        self.seated = self._request(1, 200, 40)
        self.small = self._request(2, 10, 5)
        self.suspended = self.manager.create_kv_cache(100)
        self.suspended.import_history(history(self.manager, 3, 0, 9))
        self.closed = self.manager.create_kv_cache(10)
        self.closed.close()
        self.batch.add(self.seated, 1)
        self.batch.add(self.small)
        self.rows, self.selection = int32(1, 0), int32([3, 39, -1], [1, 2, 0])

    def _request(self, number: int, need: int, length: int) -> kvcm.KvCache:
        cache = self.manager.create_kv_cache(need)
        cache.import_history(history(self.manager, number, 0, length))
        assert cache.resume()
        return cache

    def open_step(self) -> Scene:
        self.batch.resize({1: 41})
        self.batch.publish()
        self.batch.wait_ready()
        self.resolved = self.batch.resolve(0, self.rows, self.selection)
        self.batch.fetch(0, self.rows, self.resolved)
        return self

    def full(self) -> Scene:
        """No free host page, and a window above the watermark."""
        for number, units in [(7, 100), (8, 60)]:
            hog = self.manager.create_kv_cache(300)
            hog.import_history(history(self.manager, number, 0, units))
            setattr(self, f"hog{number}", hog)
        free = self.manager.occupancy().free_host_pages * 4
        hog = self.manager.create_kv_cache(300)
        hog.import_history(history(self.manager, 9, 0, free))
        self.hog9 = hog
        assert self.manager.occupancy().free_host_pages == 0
        self.batch.resize({1: 41})
        self.batch.publish()
        self.batch.wait_ready()
        self.batch.record_read([1])
        return self

    def state(self) -> dict[str, Any]:
        seen = snapshot.of_manager(self.manager) | snapshot.of_batch(self.batch)
        for name in ("seated", "small", "suspended", "closed"):
            seen[name] = snapshot.of_request(getattr(self, name))
        return seen


def between_steps() -> Scene:
    return Scene()


def in_step() -> Scene:
    return Scene().open_step()


def host_full() -> Scene:
    return Scene().full()


def batch_closed() -> Scene:
    scene = Scene()
    scene.batch.close()
    return scene


Call = Callable[[Scene], Any]


def refused(
    scene: Callable[[], Scene], error: type[Exception], function: str, calls: list[tuple[Call, str]]
) -> list[Any]:
    """Test cases: each call raises `error` of `function`; " ... " parts what its message says."""
    return [
        pytest.param(scene, call, error, function, text, id=f"{scene.__name__} {function} {text}")
        for call, text in calls
    ]


def check_refusal(
    scene: Scene, call: Call, error: type[Exception], function: str, text: str
) -> None:
    before = scene.state()
    with pytest.raises(error) as caught:
        call(scene)
    message = str(caught.value)
    assert message.startswith(f"[{function}] ")
    missing = [fragment for fragment in text.split(" ... ") if fragment not in message]
    assert not missing, f"{missing} not in: {message}"
    assert snapshot.differences(before, scene.state()) == []
