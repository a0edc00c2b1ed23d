"""What a receiver is told that it must not believe or do, and faults that are one request's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from sparse_kvcm._core import InvalidArgument, InvalidState

from receiver_cases import DsaModel, Pair, V4Model
from sparse_kvcm.step import StepRequest
from sparse_kvcm.transfer.attempts import ReceiverOptions
from sparse_kvcm.transfer.wire import SliceResult, encode_message

MODELS = {"dsa": DsaModel(), "v4": V4Model()}
PROMPT = {"dsa": 61, "v4": 701}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_who_waits_for_staging_too_long_is_told_so(kind: str) -> None:
    pair = Pair(MODELS[kind], staging=2)
    tokens = PROMPT[kind]
    pair.ask(1, tokens)  # is never offered, and has all slots
    pair.ask(2, tokens)
    pair.prefill(2, tokens)
    for pair.now, senders in ((0.0, [0]), (1.0, [0]), (121.5, [])):
        pair.run(senders)
        pair.run(senders)
    assert pair.result(1).reason == "nothing of it came within 120 s"
    assert pair.result(2).reason == "there was no staging for it within 120 s"


def test_a_fault_of_the_device_is_that_of_one_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ReceiverOptions(slice_pages=2, max_in_flight=1)
    pair = Pair(MODELS[kind], options=options)
    tokens = PROMPT[kind]
    admit, is_ready = pair.target.admit, pair.target.is_ready

    def broken_admit(key: int, *arguments: int) -> None:
        if key == 2:
            raise RuntimeError("a fault")
        admit(key, *arguments)

    def broken_event(key: int) -> bool:
        if key == 3:
            raise RuntimeError("a fault")
        return is_ready(key)

    monkeypatch.setattr(pair.target, "admit", broken_admit)
    monkeypatch.setattr(pair.target, "is_ready", broken_event)
    for request in (1, 2, 3, 4):  # all but the first wait for room
        pair.prefill(request, tokens)
        pair.ask(request, tokens)
    pair.run_to_the_end()
    assert pair.result(2).reason == "a fault"
    assert pair.result(3).reason == "its pages do not become ready: a fault"
    assert [pair.result(one).reason for one in (1, 4)] == ["", ""]
    pair.check({1: tokens, 4: tokens})
    pair.end([1, 4])


@pytest.mark.parametrize("bad", ["", "x" * 129, "\udc80", 5, None, b"1"])
def test_an_id_that_no_peer_would_take_is_refused(kind: str, bad: Any) -> None:
    pair = Pair(MODELS[kind])
    message = "request_id must be a str of 1 to 128"
    with pytest.raises(InvalidArgument, match=message):
        pair.receiver.request("prefill0", bad, 1, PROMPT[kind], PROMPT[kind])
    with pytest.raises(InvalidArgument, match=message):
        pair.senders[0].offer(bad, PROMPT[kind])
    assert pair.senders[0].use().num_offers == 0
    pair.end()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slice_pages", 0),
        ("slice_pages", -3),
        ("slice_pages", 1.5),
        ("max_in_flight", 0),
        ("max_queued", -1),
        ("num_workers", 0),
        ("num_workers", True),
        ("expiry_s", 0),
        ("expiry_s", -1.0),
        ("expiry_s", float("nan")),
        ("expiry_s", float("inf")),
        ("expiry_s", None),
        ("silence_s", 0.0),
        ("silence_s", float("nan")),
    ],
)
def test_options_under_which_nothing_would_come_or_end_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"\[ReceiverOptions\] {field} must be"):
        ReceiverOptions(**{field: value})


def test_results_of_nobody_and_twice_are_dropped_and_counted(kind: str) -> None:
    pair = Pair(MODELS[kind])
    transport = pair.network.ends["prefill0"]
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.results += pair.receiver.poll()
    for bad in (
        SliceResult("1", 99, 0, "done"),
        SliceResult("2", 1, 0, "done"),
        SliceResult("1", 1, 99, "done"),
        SliceResult("1", 1, 0, "failed", reason="x" * 50),
    ):
        if bad.status == "done":
            transport.send("decode", encode_message(bad))
    transport.send("decode", b"\xff\xff garbage")
    pair.run_to_the_end()
    assert pair.receiver.num_strays == 4
    transport.send("decode", encode_message(SliceResult("1", 1, 0, "done")))
    pair.run()
    assert pair.receiver.num_strays == 5
    assert pair.result(1).reason == ""
    pair.check({1: PROMPT[kind]})
    pair.end([1])


def test_a_result_from_another_peer_is_dropped(kind: str) -> None:
    pair = Pair(MODELS[kind], num_senders=2)
    pair.network.policy = lambda transfer: setattr(transfer, "polls_left", None)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run()
    other = pair.network.ends["prefill1"]
    posted = pair.receiver.use.posted
    for index in range(posted):
        other.send("decode", encode_message(SliceResult("1", 1, index, "done")))
        other.send("decode", encode_message(SliceResult("1", 1, index, "failed", reason="a lie")))
    pair.results += pair.receiver.poll()
    assert pair.results == []
    assert (pair.receiver.use.posted, pair.receiver.num_strays) == (posted, 2 * posted)
    pair.network.policy = lambda transfer: None
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end()
    pair.check({1: PROMPT[kind]})
    pair.end([1])


@pytest.mark.parametrize("tokens", [3, None])
def test_a_request_on_its_way_in_is_freed_by_its_receiver_alone(
    kind: str, tokens: int | None
) -> None:
    pair = Pair(MODELS[kind], staging=2)
    lengths = {1: tokens or PROMPT[kind], 2: PROMPT[kind]}
    for number, length in lengths.items():
        pair.prefill(number, length)
        pair.ask(number, length)
    pair.results += pair.receiver.poll()  # some slices are asked for, others wait for staging
    manager = pair.target_manager
    for call in (
        manager.free_request,
        manager.suspend_request,
        lambda one: manager.prepare_step([StepRequest(one, lengths[1])]),
    ):
        with pytest.raises(InvalidState, match="request 1 is receiving"):
            call(1)
    pair.run_to_the_end()
    assert [pair.result(one).reason for one in lengths] == ["", ""]
    pair.check(lengths)
    pair.end(lengths)
