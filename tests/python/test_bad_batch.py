"""What a Batch cannot do is refused by name and changes nothing, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import snapshot
import sparse_kvcm as kvcm
from factories import make_config
from foreign_array import ForeignArray
from scenes import Call, Scene, batch_closed, between_steps, check_refusal, in_step, refused
from sparse_kvcm import InvalidArgument, InvalidState, KvCacheManager


def other_batch(s: Scene) -> kvcm.Batch:
    return s.manager.create_batch(2, 200)


CASES = [
    *refused(
        between_steps,
        InvalidArgument,
        "Batch.add",
        [
            (lambda s: s.batch.add(None), "cache must be a KvCache ... got None"),
            (lambda s: s.batch.add(3), "cache must be a KvCache ... got int 3"),
            (lambda s: s.batch.add(s.seated, "1"), "row must be an int ... got str '1'"),
        ],
    ),
    *refused(
        between_steps,
        InvalidState,
        "Batch.add",
        [
            (lambda s: s.batch.add(s.suspended), "resume"),
            (lambda s: s.batch.add(s.closed), "closed"),
            (lambda s: other_batch(s).add(s.seated), "another Batch"),
            (
                lambda s: KvCacheManager(make_config()).create_batch(2, 200).add(s.seated),
                "another manager",
            ),
            (lambda s: s.batch.add(s.seated, 0), "row 1 ... 0"),
        ],
    ),
    *refused(
        batch_closed, InvalidState, "Batch.add", [(lambda s: s.batch.add(s.seated), "closed")]
    ),
    *refused(
        between_steps,
        InvalidState,
        "Batch.remove",
        [(lambda s: s.batch.remove(s.suspended), "does not sit")],
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "Batch.remove",
        [(lambda s: s.batch.remove(None), "cache must be a KvCache ... got None")],
    ),
    *refused(
        batch_closed, InvalidState, "Batch.remove", [(lambda s: s.batch.remove(s.seated), "closed")]
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "Batch.resize",
        [
            (lambda s: s.batch.resize({3: 1}), "row ... [0, 3) ... got 3"),
            (lambda s: s.batch.resize({-1: 1}), "row ... [0, 3) ... got -1"),
            (lambda s: s.batch.resize({2: 1}), "2"),
            (lambda s: s.batch.resize({1: 41, 0: 4}), "5 ... got 4"),
            (lambda s: s.batch.resize({1: -1}), "got -1"),
            (lambda s: s.batch.resize({-1: "x"}), "lengths[-1] must be an int ... got str 'x'"),
            (lambda s: s.batch.resize({1: None}), "lengths[1] must be an int ... got None"),
            (
                lambda s: s.batch.resize({1.5: 41}),
                "key of lengths must be an int ... got float 1.5",
            ),
            (lambda s: s.batch.resize([41]), "lengths must be a dict ... got list [41]"),
        ],
    ),
    *refused(in_step, InvalidState, "Batch.resize", [(lambda s: s.batch.resize({1: 42}), "step")]),
    *refused(
        batch_closed, InvalidState, "Batch.resize", [(lambda s: s.batch.resize({}), "closed")]
    ),
    *refused(
        in_step, InvalidState, "Batch.publish", [(lambda s: s.batch.publish(), "step is open")]
    ),
    *refused(
        batch_closed, InvalidState, "Batch.publish", [(lambda s: s.batch.publish(), "closed")]
    ),
    *refused(
        between_steps,
        InvalidArgument,
        "Batch.publish",
        [(lambda s: s.batch.publish(1.0), "stream must be an int ... got float 1.0")],
    ),
    *refused(
        between_steps,
        InvalidState,
        "Batch.wait_ready",
        [(lambda s: s.batch.wait_ready(), "no step is open")],
    ),
    *refused(
        batch_closed, InvalidState, "Batch.wait_ready", [(lambda s: s.batch.wait_ready(), "closed")]
    ),
    *refused(
        in_step,
        InvalidArgument,
        "Batch.wait_ready",
        [(lambda s: s.batch.wait_ready(-1), "stream ... got -1")],
    ),
    *refused(
        between_steps,
        InvalidState,
        "Batch.record_read",
        [(lambda s: s.batch.record_read([]), "no step is open")],
    ),
    *refused(
        in_step,
        InvalidArgument,
        "Batch.record_read",
        [
            (lambda s: s.batch.record_read([1, 2]), "rows ... 2"),
            (lambda s: s.batch.record_read([1, -1]), "rows ... [0, 3) ... got -1"),
            (lambda s: s.batch.record_read([1, 0, 1]), "1 ... twice"),
            (lambda s: s.batch.record_read(1), "rows must be a sequence of ints ... got int 1"),
            (lambda s: s.batch.record_read(["1"]), "rows[0] must be an int ... got str '1'"),
            (lambda s: s.batch.record_read([1], None), "stream must be an int ... got None"),
        ],
    ),
    *refused(
        between_steps,
        InvalidState,
        "Batch.abort_step",
        [(lambda s: s.batch.abort_step(), "no step is open")],
    ),
    *refused(
        in_step,
        InvalidArgument,
        "Batch.abort_step",
        [(lambda s: s.batch.abort_step(-1), "stream ... got -1")],
    ),
    *refused(
        in_step,
        InvalidArgument,
        "Batch.resolve",
        [
            (lambda s: s.batch.resolve(2, s.rows, s.selection), "group ... [0, 2) ... got 2"),
            (lambda s: s.batch.resolve(-1, s.rows, s.selection), "group ... got -1"),
            (
                lambda s: s.batch.resolve(None, s.rows, s.selection),
                "group must be an int ... got None",
            ),
            (
                lambda s: s.batch.resolve(0, s.rows, np.zeros((2, 7), np.int32)),
                "k ... [1, 6] ... got 7",
            ),
            (
                lambda s: s.batch.resolve(1, s.rows, np.zeros((2, 5), np.int32)),
                "k ... [1, 4] ... got 5",
            ),
            (
                lambda s: s.batch.resolve(0, np.zeros(4, np.int32), np.zeros((4, 2), np.int32)),
                "b ... 3 ... got 4",
            ),
            (
                lambda s: s.batch.resolve(0, s.rows.astype(np.int64), s.selection),
                "rows must be int32 [b] on cpu ... int64 [2] on cpu",
            ),
            (
                lambda s: s.batch.resolve(0, [1, 0], s.selection),
                "rows must be int32 [b] on cpu ... got list [1, 0]",
            ),
            (
                lambda s: s.batch.resolve(0, s.rows, s.selection[:1]),
                "selection must be int32 [b = 2 of rows, k] on cpu ... [1, 3]",
            ),
            (
                lambda s: s.batch.resolve(0, ForeignArray((2,)), s.selection),
                "rows must be int32 [b] on cpu ... on cuda:0",
            ),
            (
                lambda s: s.batch.resolve(0, s.rows, s.selection, 5),
                "out must be a ResolveOutputs ... got int 5",
            ),
            (
                lambda s: s.batch.resolve(
                    0, s.rows, s.selection, kvcm.ResolveOutputs.empty(2, 3, 1)
                ),
                "out.write_slots ... max_new_units = 2 of the config ... [2, 1]",
            ),
            (
                lambda s: s.batch.resolve(
                    0, s.rows, s.selection, kvcm.ResolveOutputs.empty(2, 4, 2)
                ),
                "out.slots ... k = 3 of selection ... [2, 4]",
            ),
        ],
    ),
    *refused(
        batch_closed,
        InvalidState,
        "Batch.resolve",
        [(lambda s: s.batch.resolve(0, s.rows, s.selection), "closed")],
    ),
    *refused(
        in_step,
        InvalidArgument,
        "Batch.fetch",
        [
            (lambda s: s.batch.fetch(0, s.rows, None), "out must be a ResolveOutputs ... got None"),
            (lambda s: s.batch.fetch(9, s.rows, s.resolved), "group ... [0, 2) ... got 9"),
            (
                lambda s: s.batch.fetch(0, s.rows[:1], s.resolved),
                "out.miss_ordinals must be int32 [b = 1 of rows, k] ... [2, 3]",
            ),
            (lambda s: s.batch.fetch(0, s.rows, s.resolved, -1), "stream ... got -1"),
            (
                lambda s: s.batch.fetch(0, s.rows, s.resolved, layers=[]),
                "layers ... None means all",
            ),
            (lambda s: s.batch.fetch(0, s.rows, s.resolved, layers=[99]), "group 0 ... got 99"),
            (lambda s: s.batch.fetch(0, s.rows, s.resolved, layers=3), "layers ... got"),
        ],
    ),
    *refused(
        batch_closed,
        InvalidState,
        "Batch.fetch",
        [(lambda s: s.batch.fetch(0, s.rows, kvcm.ResolveOutputs.empty(2, 3, 2)), "closed")],
    ),
]


@pytest.mark.parametrize(("make_scene", "call", "error", "function", "text"), CASES)
def test_call_is_refused_and_changes_nothing(
    make_scene: Callable[[], Scene], call: Call, error: type[Exception], function: str, text: str
) -> None:
    check_refusal(make_scene(), call, error, function, text)


@pytest.mark.parametrize("seated", [False, True])
@pytest.mark.parametrize("row", [-1, -2, 3])
def test_add_refuses_a_row_that_is_no_seat(row: int, seated: bool) -> None:
    """-1 is padding in a launch and must not become a seat, for whoever asks."""
    scene = Scene()
    if not seated:
        scene.batch.remove(scene.seated)
    before = scene.state()
    with pytest.raises(InvalidArgument, match=rf"\[Batch.add\] row .*\[0, 3\), got {row}"):
        scene.batch.add(scene.seated, row)
    assert snapshot.differences(before, scene.state()) == []


def test_add_refuses_an_occupied_row_and_a_full_batch() -> None:
    scene = Scene()
    newcomer = scene.manager.create_kv_cache(10)
    assert newcomer.resume()
    with pytest.raises(InvalidArgument, match=r"\[Batch.add\] row .* occupied row 1"):
        scene.batch.add(newcomer, 1)
    assert newcomer.row is None
    scene.batch.add(newcomer)
    another = scene.manager.create_kv_cache(4)
    assert another.resume()
    with pytest.raises(InvalidState, match=r"\[Batch.add\] all 3 rows are taken"):
        scene.batch.add(another)
    assert another.row is None


def test_add_refuses_a_need_above_the_batch_s() -> None:
    scene = Scene()
    scene.batch.remove(scene.small)
    narrow = scene.manager.create_batch(1, 9)
    with pytest.raises(InvalidArgument, match=r"\[Batch.add\] .*need.* 9.* 10"):
        narrow.add(scene.small)
    assert scene.small.row is None
