"""What the manager and requests cannot do is refused by name and changes nothing, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from factories import history
from foreign_array import ForeignArray
from scenes import Call, Scene, between_steps, check_refusal, host_full, in_step, refused
from sparse_kvcm import InvalidArgument, InvalidState, OutOfPages


def units(s: Scene, first: int, last: int, **layers: Any) -> dict[Any, Any]:
    """Units of the seated request; layer2=... replaces those of layer 2."""
    named = {int(name.removeprefix("layer")): value for name, value in layers.items()}
    return history(s.manager, 1, first, last) | named


def without(layers: dict[Any, Any], layer: int) -> dict[Any, Any]:
    return {key: value for key, value in layers.items() if key != layer}


CASES = [
    *refused(
        between_steps,
        InvalidArgument,
        "KvCacheManager.create_kv_cache",
        [
            (lambda s: s.manager.create_kv_cache(0), "need ... [1, 16777215] ... got 0"),
            (lambda s: s.manager.create_kv_cache(-1), "need ... got -1"),
            (lambda s: s.manager.create_kv_cache(2**24), "need ... [1, 16777215] ... got 16777216"),
            (
                lambda s: s.manager.create_kv_cache(2**70),
                "need ... [1, 16777215] ... got 1180591620717411303424",
            ),
            (
                lambda s: s.manager.create_kv_cache(10**5000),
                "need ... [1, 16777215] ... got a longer int",
            ),
            (lambda s: s.manager.create_kv_cache(None), "need must be an int ... got None"),
            (lambda s: s.manager.create_kv_cache(10.0), "need must be an int ... got float 10.0"),
            (lambda s: s.manager.create_kv_cache(100, 9), "cached_slots ... multiple ... got 9"),
            (lambda s: s.manager.create_kv_cache(100, 4), "cached_slots ... top_k ... got 4"),
            (lambda s: s.manager.create_kv_cache(100, -4), "cached_slots ... got -4"),
            (lambda s: s.manager.create_kv_cache(100, -1), "cached_slots ... got -1"),
            (
                lambda s: s.manager.create_kv_cache(100, 65536),
                "cached_slots ... 65535 ... got 65536",
            ),
            (
                lambda s: s.manager.create_kv_cache(100, "8"),
                "cached_slots must be an int ... got str '8'",
            ),
            (lambda s: s.manager.create_kv_cache(100, 48), "52 slots ... 48"),
        ],
    ),
    *refused(
        between_steps, InvalidState, "KvCache.resume", [(lambda s: s.closed.resume(), "closed")]
    ),
    *refused(
        between_steps, InvalidState, "KvCache.suspend", [(lambda s: s.closed.suspend(), "closed")]
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCache.resume",
        [(lambda s: s.seated.resume(-1), "stream ... got -1")],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCache.suspend",
        [(lambda s: s.seated.suspend("x"), "stream must be an int ... got str 'x'")],
    ),
    *refused(in_step, InvalidState, "KvCache.suspend", [(lambda s: s.seated.suspend(), "step")]),
    *refused(host_full, OutOfPages, "KvCache.suspend", [(lambda s: s.seated.suspend(), "1 ")]),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCache.decode_entries",
        [
            (lambda s: s.seated.decode_entries(2), "group ... [0, 2) ... got 2"),
            (lambda s: s.seated.decode_entries(-1), "group ... [0, 2) ... got -1"),
        ],
    ),
    *refused(
        between_steps,
        InvalidState,
        "KvCache.decode_entries",
        [(lambda s: s.suspended.decode_entries(0), "no lease")],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCache.import_history",
        [
            (
                lambda s: s.seated.import_history([1, 2]),
                "layers must be a dict ... got list [1, 2]",
            ),
            (lambda s: s.seated.import_history(None), "layers must be a dict ... got None"),
            (
                lambda s: s.seated.import_history({"a": 1}),
                "key of layers must be an int ... got str 'a'",
            ),
            (lambda s: s.seated.import_history(units(s, 40, 44, layer9=0)), "layers ... got 9"),
            (
                lambda s: s.seated.import_history(without(units(s, 40, 44), 2)),
                "layers must have all 3 ... layer 2",
            ),
            (
                lambda s: s.seated.import_history(units(s, 40, 44, layer2=None)),
                "layers[2] ... got None",
            ),
            (
                lambda s: s.seated.import_history(
                    units(s, 40, 44, layer2=np.zeros((3, 32), np.uint8))
                ),
                "layers[2] ... n = 4 of layers[0] ... [3, 32]",
            ),
            (
                lambda s: s.seated.import_history(
                    units(s, 40, 44, layer2=np.zeros((4, 33), np.uint8))
                ),
                "layers[2] must have rows of 32 bytes ... got 33",
            ),
            (
                lambda s: s.seated.import_history(
                    units(s, 40, 44, layer1=np.zeros((4, 36), np.int16))
                ),
                "layers[1] must have rows of 36 bytes ... got 72",
            ),
            (
                lambda s: s.seated.import_history(
                    units(s, 40, 44, layer1=np.zeros((4, 72), np.uint8)[:, ::2])
                ),
                "layers[1] ... each row C-contiguous ... strides [72, 2]",
            ),
            (
                lambda s: s.seated.import_history(units(s, 40, 44, layer1=ForeignArray((4, 9)))),
                "layers[1] ... in host memory ... on cuda:0",
            ),
            (lambda s: s.seated.import_history(units(s, 40, 201)), "need ... 200 ... 161"),
            (lambda s: s.suspended.import_history(units(s, 9, 10), -2), "stream ... got -2"),
        ],
    ),
    *refused(
        between_steps,
        InvalidState,
        "KvCache.import_history",
        [(lambda s: s.closed.import_history(units(s, 0, 1)), "closed")],
    ),
    *refused(
        in_step,
        InvalidState,
        "KvCache.import_history",
        [(lambda s: s.seated.import_history(units(s, 40, 41)), "step")],
    ),
    *refused(
        host_full,
        OutOfPages,
        "KvCache.import_history",
        [(lambda s: s.suspended.import_history(units(s, 9, 40)), "31 units")],
    ),
    *refused(
        host_full,
        InvalidState,
        "KvCache.import_history",
        [(lambda s: s.seated.import_history(units(s, 41, 42)), "watermark")],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCacheManager.arena",
        [
            (lambda s: s.manager.arena(7), "layer ... got 7"),
            (lambda s: s.manager.arena("0"), "layer must be an int ... got str '0'"),
        ],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCacheManager.group_of",
        [(lambda s: s.manager.group_of(7), "layer ... got 7")],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCacheManager.host_history",
        [
            (lambda s: s.manager.host_history(2), "group ... [0, 2) ... got 2"),
            (lambda s: s.manager.host_history(-1), "group ... got -1"),
        ],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "KvCacheManager.create_batch",
        [
            (lambda s: s.manager.create_batch(0, 10), "max_rows ... got 0"),
            (lambda s: s.manager.create_batch(-3, 10), "max_rows ... got -3"),
            (
                lambda s: s.manager.create_batch(2**20 + 1, 10),
                "max_rows ... 1048576 ... got 1048577",
            ),
            (lambda s: s.manager.create_batch(1, 0), "max_units ... [1, 16777215] ... got 0"),
            (
                lambda s: s.manager.create_batch(1, 2**24),
                "max_units ... [1, 16777215] ... got 16777216",
            ),
            (
                lambda s: s.manager.create_batch(1, 2**31),
                "max_units ... [1, 16777215] ... got 2147483648",
            ),
            (lambda s: s.manager.create_batch(1, 10, 3), "no_write_slot ... -1 ... 48 ... got 3"),
            (
                lambda s: s.manager.create_batch(1.5, 10),
                "max_rows must be an int ... got float 1.5",
            ),
        ],
    ),
]


@pytest.mark.parametrize(("make_scene", "call", "error", "function", "text"), CASES)
def test_call_is_refused_and_changes_nothing(
    make_scene: Callable[[], Scene], call: Call, error: type[Exception], function: str, text: str
) -> None:
    check_refusal(make_scene(), call, error, function, text)
