"""A peer that says nothing costs its own requests, within a bound; the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from receiver_cases import DsaModel, Pair, V4Model
from sparse_kvcm.transfer.attempts import ReceiverOptions

MODELS = {"dsa": DsaModel(), "v4": V4Model()}
PROMPT = {"dsa": 61, "v4": 401}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def hold(pair: Pair) -> None:
    """From now on transfers end when they are finished by hand."""

    def policy(transfer: Any) -> None:
        transfer.polls_left = None

    pair.network.policy = policy


@pytest.mark.parametrize("silence_s", [30.0, 4.0])
def test_a_peer_that_says_nothing_is_given_up_within_a_bound(kind: str, silence_s: float) -> None:
    options = ReceiverOptions(slice_pages=2, silence_s=silence_s)
    pair = Pair(MODELS[kind], options=options)
    pair.ask(1, PROMPT[kind])

    def poll_at(seconds: float) -> None:
        pair.now = seconds
        pair.results += pair.receiver.poll()

    for part in (0, 0.24, 0.25, 1.24):  # the Ping goes out at 0.25
        poll_at(part * silence_s)
    assert pair.results == []
    poll_at(1.25 * silence_s)
    silent = f"no answer to a Ping within {silence_s:g} s"
    assert pair.result(1).reason == f"peer prefill0 is silent: {silent}"
    poll_at(2.24 * silence_s)
    assert pair.receiver.use.posted > 0  # it might still write
    poll_at(2.25 * silence_s)
    pair.end()


def test_a_peer_that_answers_has_until_the_expiry(kind: str) -> None:
    pair = Pair(MODELS[kind])
    hold(pair)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    while pair.now <= 120.0:
        pair.run()
        assert pair.results == []
        pair.now += 5.0
    pair.results += pair.receiver.poll()
    assert pair.result(1).reason == "nothing of it came within 120 s"
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end()
    pair.end()


def test_a_receiver_that_was_not_called_takes_nobody_for_silent(kind: str) -> None:
    pair = Pair(MODELS[kind])
    pair.ask(1, PROMPT[kind])
    pair.results += pair.receiver.poll()
    pair.now = 100.0
    pair.results += pair.receiver.poll()
    assert pair.results == []
    pair.senders[0].progress()
    pair.now = 119.0
    pair.results += pair.receiver.poll()
    assert pair.results == []


def test_a_silent_peer_costs_its_own_requests_alone(kind: str) -> None:
    pair = Pair(MODELS[kind], num_senders=2, staging=16)
    hold(pair)
    for request, number in ((1, 0), (2, 1)):
        pair.prefill(request, PROMPT[kind], number)
        pair.ask(request, PROMPT[kind], number)
    while pair.now < 100.0:
        pair.run(senders=[1])
        pair.now += 5.0
    assert [one.request_id for one in pair.results] == ["1"]
    pair.network.policy = lambda transfer: None
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end(senders=[1])
    assert pair.result(2).reason == ""
    pair.check({2: PROMPT[kind]})
    pair.end([2])


def test_close_deregisters_memory_before_pages_of_silent_peers_go_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(MODELS[kind])
    pair.ask(1, PROMPT[kind])
    pair.receiver.poll()
    registered, drop = [], pair.target.drop

    def tapped(key: int) -> None:
        registered.append(dict(pair.network.ends["decode"].regions))
        drop(key)

    monkeypatch.setattr(pair.target, "drop", tapped)
    pair.receiver.close(0)
    assert registered == [{}]
    pair.end()


@pytest.mark.parametrize("num_late", [1, 2])
def test_peers_that_stall_leave_staging_to_others(kind: str, num_late: int) -> None:
    staging = 4 * num_late
    pair = Pair(MODELS[kind], num_senders=num_late + 1, staging=staging)
    hold(pair)
    for late in range(num_late):  # they were there first, and answer Pings
        pair.prefill(late, PROMPT[kind], late)
        pair.ask(late, PROMPT[kind], late)
        pair.run()
        pair.run()
    assert pair.receiver.use.staging == staging - 2
    pair.network.policy = lambda transfer: None
    pair.prefill(7, PROMPT[kind], num_late)
    pair.ask(7, PROMPT[kind], num_late)
    pair.run_until(lambda: bool(pair.results))  # at once: the clock stands still
    assert (pair.result(7).reason, pair.now) == ("", 0.0)
    assert pair.receiver.use.staging == staging - 2
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end()
    pair.check(dict.fromkeys((*range(num_late), 7), PROMPT[kind]))
    pair.end((*range(num_late), 7))
