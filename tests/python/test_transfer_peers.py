"""Receivers: dead, removed, hostile, of another rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_kvcm import InvalidArgument
from sparse_kvcm.transfer.in_process import InProcessTransport, Network
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.sender import Sender
from sparse_kvcm.transfer.transport import TransferRefusedError
from sparse_kvcm.transfer.wire import Cancel, PageList, SliceResult
from transfer_cases import HISTORY, Side, check_landed
from transfer_world import KINDS, World, held


def test_a_dead_peer_costs_only_its_own_requests() -> None:
    world = World(policy=held)
    alive, dead = world.receiver("alive"), world.receiver("dead")
    for index, (name, receiver) in enumerate((("a", alive), ("b", dead), ("c", dead))):
        world.offer(name, 37, range(5 * index, 16))
        receiver.ask(name, 37)
    dead.ask("never offered", 37)
    world.step()
    world.network.kill("dead")
    for index in list(world.network.transfers):
        world.network.finish(index)
    world.step(2)
    assert {name: one.status for name, one in world.outcomes.items()} == {
        "a": "done",
        "b": "failed",
        "c": "failed",
    }
    world.sender.remove_peer("dead")
    world.step()
    check_landed("a", world.source, alive.side, alive.side.pages(37), 37)
    world.assert_nothing_is_held()


def test_a_peer_that_is_removed_is_forgotten_when_nothing_moves() -> None:
    world = World(policy=held)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37)
    receiver.ask("b", 37)
    world.step()
    world.sender.remove_peer("receiver")
    world.sender.remove_peer("nobody")
    world.step()
    assert world.outcomes == {}
    assert world.sender.use().num_handles == 2
    for index in (0, 1):
        world.network.finish(index)
    world.step()
    assert world.outcomes["a"].reason == "peer receiver is gone"
    assert receiver.poll() == []
    world.assert_nothing_is_held()
    Sender(InProcessTransport(world.network, "later"), world.source.table).add_peer(receiver.card())


def test_a_peer_that_cannot_be_served_is_refused_by_its_card() -> None:
    world = World()
    receiver = world.receiver()
    with pytest.raises(InvalidArgument, match="new one"):
        world.sender.add_peer(receiver.card())
    with pytest.raises(PeerDataError, match="malformed"):
        world.sender.add_peer(b"garbage")
    other = World(landing=[replace(HISTORY, role="OTHER")])
    with pytest.raises(PeerDataError, match="source's table"):
        other.receiver()


def test_what_strangers_and_fools_say_is_dropped() -> None:
    world = World()
    receiver = world.receiver()
    stranger = InProcessTransport(world.network, "stranger")
    stranger.add_peer(world.transport.metadata())
    stranger.send("sender", b"\x80")
    receiver.transport.send("sender", b"\xc1 not msgpack")
    receiver.tell(SliceResult("a", 1, 0, "done"))
    world.step()
    assert world.sender.use().num_dropped == 3
    world.offer("a", 20)
    receiver.ask("a", 20)
    world.step()
    assert world.outcomes["a"].status == "done"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tokens": 21}, "prompt_tokens must be 20, got 21"),
        ({"pages": [PageList.of(7, 0, [0])]}, "layer group of target"),
        ({"pages": [PageList.of(0, 0, [99])]}, "slots of target"),
        ({"pages": [PageList.of(0, 0, [0])]}, "target pages"),
    ],
)
@pytest.mark.parametrize("order", ["offer first", "request first"])
def test_a_claim_that_does_not_fit_is_refused_and_the_offer_is_anothers(
    how: dict, words: str, order: str
) -> None:
    world = World()
    hostile, rightful = world.receiver("hostile"), world.receiver("rightful")
    if order == "offer first":
        world.offer("a", 20)
    hostile.ask("a", **{"tokens": 20, "slices": (0, 2), **how})
    hostile.ask("a", 20, slices=(1, 2))  # of an attempt that was refused
    if order == "request first":
        world.step()
        world.offer("a", 20)
    world.step()
    assert (world.outcomes, world.starts) == ({}, [])
    first, second = hostile.poll()
    assert words in first.reason
    assert second.reason == "another slice of this attempt was refused"
    hostile.tell(Cancel("a", 1, "spite"))
    rightful.ask("a", 20)
    world.step()
    assert (rightful.poll()[0].status, world.outcomes["a"].status) == ("done", "done")
    check_landed("a", world.source, rightful.side, rightful.side.pages(20), 20)
    assert all((pool == 0xEE).all() for pool in hostile.side.pools)
    world.assert_nothing_is_held()


@pytest.mark.parametrize("order", ["offer first", "request first", "canceled first"])
def test_an_offer_for_one_peer_is_no_others(order: str) -> None:
    world = World()
    other, rightful = world.receiver("other"), world.receiver("rightful")
    with pytest.raises(InvalidArgument, match="peer must be one that was added, got 'nobody'"):
        world.offer("a", 20, peer="nobody")
    if order == "offer first":
        world.offer("a", 20, peer="rightful")
    other.ask("a", 20)
    world.step()
    other.tell(Cancel("a", 1, "spite"))
    if order == "canceled first":
        world.step()
    if order != "offer first":
        world.offer("a", 20, peer="rightful")
    rightful.ask("a", 20)
    world.step()
    assert [one.status for one in other.poll()] == ["failed"]
    assert (rightful.poll()[0].status, world.outcomes["a"].status) == ("done", "done")
    world.assert_nothing_is_held()


def test_a_flood_of_unknown_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_kvcm.transfer.ledger.MAX_OPEN_SLICES", 5)
    world = World()
    flood, other = world.receiver("flood"), world.receiver("other")
    for index in range(9):
        flood.ask(f"x{index}", 20)
    world.offer("a", 20)
    other.ask("a", 20)
    world.step()
    assert world.sender.use().num_unclaimed == 5
    assert sum("no result yet" in one.reason for one in flood.poll()) == 4
    assert world.outcomes["a"].status == "done"


def test_page_lists_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_kvcm.transfer.ledger.MAX_OPEN_BYTES", 40000)
    world = World()
    flood, other = world.receiver("flood"), world.receiver("other")
    pages = [PageList.of(0, 0, [0] * 4000)]
    for index in range(5):
        flood.ask(f"x{index}", 20, pages)
    world.offer("a", 20)
    other.ask("a", 20)
    world.step()
    assert world.sender.use().num_unclaimed == 2
    assert sum("bytes of page lists" in one.reason for one in flood.poll()) == 3
    assert world.outcomes["a"].status == "done"
    world.clock.now += 120
    world.step()
    flood.ask("b", 20, pages)  # there is room again
    world.offer("b", 20)
    world.step()
    assert "bytes of page lists" not in world.outcomes["b"].reason
    world.assert_nothing_is_held()


def test_only_the_rank_whose_turn_it_is_sends() -> None:
    ranks = [World(rank=RankInfo(rank, 3)) for rank in range(3)]
    results = []
    for world in ranks:
        receiver = world.receiver(rank=RankInfo(1, 2, "attention_dp"))
        world.offer("a", 20)
        receiver.ask("a", 20)
        world.step()
        results += receiver.poll()
    assert [(one.status, one.rank) for one in results] == [
        ("failed", 0),
        ("done", 1),
        ("failed", 2),
    ]
    assert results[0].reason == "rank 0 of 3 does not send to rank 1 of 2"


def test_a_table_whose_memory_cannot_be_registered_is_refused() -> None:
    class Full(InProcessTransport):
        def register(self, regions):
            raise TransferRefusedError("[register] no more memory regions")

    with pytest.raises(InvalidArgument, match="no more memory regions"):
        Sender(Full(Network(), "a"), Side(KINDS, 8).table)
