"""Preparation of a step against a backend that writes down what it is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_kvcm as kvcm
from sparse_kvcm.step import StepRequest, forward_order, prepare


class Backend:
    """Rows of a fixed number; requests 0 to 9 have 100 tokens."""

    max_rows = 4

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.rows: dict[int, int] = {}
        self.refuse: dict[int, str] = {}
        self.fails = False
        self.open = False

    def abort_open_step(self) -> None:
        self.calls.append("abort")
        self.open = False

    def frontier(self, request_id: int) -> int | None:
        return 100 if 0 <= request_id < 10 else None

    def row_of(self, request_id: int) -> int | None:
        return self.rows.get(request_id)

    def seat(self, request_id: int) -> int:
        row = min(set(range(self.max_rows)) - set(self.rows.values()))
        self.rows[request_id] = row
        self.calls.append(("seat", request_id, row))
        return row

    def unseat(self, request_id: int) -> None:
        self.calls.append(("unseat", request_id))
        del self.rows[request_id]

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        assert not self.open
        self.calls.append(("grow", dict(lengths)))
        return {row: why for row, why in self.refuse.items() if row in lengths}

    def publish(self) -> Iterable[int]:
        if self.fails:
            raise RuntimeError("the device failed")
        self.open = True
        self.calls.append("publish")
        return [1]


def request(request_id: int, batch_index: int | None = None, **fields: Any) -> StepRequest:
    return StepRequest(request_id, fields.pop("history", 100), batch_index=batch_index, **fields)


def test_rows_are_bound_in_the_order_of_the_forward() -> None:
    """Fails if the sort moves behind the seating: rows are given out in order of asking."""
    backend = Backend()
    step = prepare(backend, [request(3, 1), request(5), request(4, 0), request(6)])
    assert [r.request_id for r in step.requests] == [5, 6, 4, 3]
    assert step.rows == (0, 1, 2, 3)
    assert backend.rows == {5: 0, 6: 1, 4: 2, 3: 3}
    assert backend.calls == [
        "abort",
        *[("seat", request_id, row) for row, request_id in enumerate([5, 6, 4, 3])],
        ("grow", {0: 101, 1: 101, 2: 101, 3: 101}),
        "publish",
    ]


def test_requests_that_stay_keep_their_rows() -> None:
    backend = Backend()
    prepare(backend, [request(3), request(5)])
    step = prepare(backend, [request(7), request(5, 1)])
    assert [r.request_id for r in step.requests] == [7, 5]
    assert step.rows == (2, 1)


@given(st.lists(st.none() | st.integers(0, 5), max_size=8))
def test_the_sort_is_stable_and_puts_what_comes_in_first(indices: list[int | None]) -> None:
    requests = [request(i, index) for i, index in enumerate(indices)]
    order = forward_order(requests)
    new = [r for r in requests if r.batch_index is None]
    assert order[: len(new)] == new
    keys = [(r.batch_index, r.request_id) for r in order[len(new) :]]
    assert keys == sorted(keys)


def test_padding_comes_last_and_a_graph_that_is_too_small_is_refused() -> None:
    backend = Backend()
    assert prepare(backend, [request(1), request(2)], padded_size=4).rows == (0, 1, -1, -1)
    assert prepare(backend, [], padded_size=2).rows == (-1, -1)
    for size in (2, 5):
        with pytest.raises(
            kvcm.InvalidArgument, match=rf"padded_size must be in \[3 requests, 4\], got {size}"
        ):
            prepare(backend, [request(1), request(2), request(3)], padded_size=size)
    assert sorted(backend.rows) == [1, 2]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(i) for i in range(5)], "requests must be at most 4, got 5"),
        ([request(1), request(1)], "request 1 must be named once"),
        ([request(11)], "request 11 must be one of the manager's"),
        ([request(1, history=99)], "history of request 1 must be 100, .*, got 99"),
        ([request(1, history=101)], "history of request 1 must be 100, .*, got 101"),
        ([request(1, new_tokens=0)], "new_tokens of request 1 must be >= 1, got 0"),
        ([request(1, new_tokens=2)], "new_tokens of request 1 must be <= 1, got 2"),
        ([request(1), request(2, is_context=True)], "request 2 must decode"),
        ([request(1, beam_width=2)], "beam_width of request 1 must be 1, got 2"),
        ([request(1, is_context="no")], "is_context of request 1 must be a bool, got 'no'"),
    ],
)
def test_a_batch_that_cannot_be_binds_no_row(requests: list[StepRequest], message: str) -> None:
    backend = Backend()
    with pytest.raises(kvcm.InvalidArgument, match=message):
        prepare(backend, requests)
    assert backend.calls == ["abort"]


def test_prompts_of_several_tokens_are_taken_where_they_may_come() -> None:
    step = prepare(
        Backend(), [request(1, is_context=True, new_tokens=7), request(2)], decode_only=False
    )
    assert [r.length for r in step.requests] == [107, 101]


def test_rows_without_room_are_named_and_who_came_leaves() -> None:
    backend = Backend()
    prepare(backend, [request(3)])
    backend.refuse = {0: "OUT_OF_PAGES", 2: "PAST_NEED"}
    with pytest.raises(
        kvcm.OutOfPages, match=r"request 3 \(OUT_OF_PAGES\), request 2 \(PAST_NEED\)"
    ):
        prepare(backend, [request(3, 0), request(1), request(2)])
    assert backend.rows == {3: 0}
    assert not backend.open


def test_a_failed_publication_leaves_seats_as_they_were_and_the_next_step_is_good() -> None:
    backend = Backend()
    backend.fails = True
    with pytest.raises(RuntimeError):
        prepare(backend, [request(3)])
    assert not backend.rows
    backend.fails = False
    assert prepare(backend, [request(3)]).rows == (0,)


def test_what_a_failed_forward_left_goes_before_anything_else() -> None:
    """Fails if the abort moves behind the growth: this backend refuses to grow in an open step."""
    backend = Backend()
    prepare(backend, [request(3)])
    assert backend.open
    prepare(backend, [request(3, 0)])
    assert backend.calls[4:] == ["abort", ("grow", {0: 101}), "publish"]
