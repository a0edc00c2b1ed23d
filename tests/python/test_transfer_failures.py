"""What fails, is canceled, repeated, unknown or late, and what is in doubt."""

from __future__ import annotations

import pytest

from sparse_kvcm import InvalidArgument, InvalidState
from sparse_kvcm.transfer.in_process import Transfer
from sparse_kvcm.transfer.sender import UNCLAIMED_SECONDS
from sparse_kvcm.transfer.wire import Cancel
from transfer_world import World, held, sending


def test_a_failed_group_fails_the_request_after_the_others_have_drained() -> None:
    world, receiver = sending(policy=held)
    world.network.transfers[0].fails = True
    world.network.finish(0)
    world.step(3)
    assert world.outcomes == {}
    assert receiver.poll() == []
    assert world.sender.in_doubt() == {"a": "the transfer failed"}
    assert not world.network.transfers[1].canceled
    world.network.finish(1)
    world.step()
    assert world.outcomes["a"].status == "failed"
    (result,) = receiver.poll()
    assert (result.status, result.reason) == ("failed", "the transfer failed")
    assert result.transfer_groups == ()
    world.assert_nothing_is_held()


def test_slices_behind_a_failed_one_are_answered_too() -> None:
    world = World(policy=held)
    receiver = world.receiver()
    world.offer("a", 40, computed=16)
    receiver.ask("a", 40, receiver.side.pages(40)[:1], span=(0, 16), slices=(0, 3))
    receiver.ask("a", 40, span=(16, 30), slices=(1, 3))
    world.step()
    world.network.transfers[0].fails = True
    world.network.finish(0)
    world.step()
    assert sorted((one.slice_id, one.status) for one in receiver.poll()) == [
        (0, "failed"),
        (1, "failed"),
    ]
    receiver.ask("a", 40, span=(30, 40), slices=(2, 3))
    world.step()
    assert [(one.slice_id, one.status) for one in receiver.poll()] == [(2, "failed")]


@pytest.mark.parametrize("known_as", ["done", "failed"])
def test_an_exception_after_submit_leaves_the_transfer_in_doubt_until_it_is_known(
    known_as: str,
) -> None:
    def policy(transfer: Transfer) -> None:
        transfer.fails = known_as == "failed"
        transfer.start_error = RuntimeError("connection reset") if transfer.index == 1 else None
        transfer.poll_errors = 3

    world, receiver = sending(policy=policy)
    assert "a" in world.sender.in_doubt()
    assert world.sender.use().num_handles == 2
    assert world.outcomes == {}
    with pytest.raises(InvalidState, match="outcome"):
        world.sender.close()
    assert world.transport.regions
    world.step(3)
    assert world.outcomes["a"].status == known_as
    assert receiver.poll()[0].status == known_as
    assert world.sender.in_doubt() == {}
    world.assert_nothing_is_held()


def test_if_a_group_cannot_be_prepared_none_is_started() -> None:
    world = World()
    receiver = world.receiver()
    receiver.transport.regions[1] = receiver.transport.regions[1][:1]  # of three pools
    world.offer("a", 37)
    receiver.ask("a", 37)
    world.step()
    assert world.starts == []
    assert "registered VRAM" in world.outcomes["a"].reason
    assert receiver.poll()[0].status == "failed"
    assert all((pool == 0xEE).all() for pool in receiver.side.pools)
    world.assert_nothing_is_held()


def test_an_abort_waits_for_what_moves() -> None:
    world, receiver = sending(policy=held)
    world.sender.abort("a", "preempted")
    world.step()
    assert world.outcomes == {}
    assert world.sender.in_doubt() == {"a": "preempted"}
    assert all(one.canceled for one in world.network.transfers.values())
    world.network.finish(0)
    world.network.finish(1)
    world.step()
    assert (world.outcomes["a"].status, world.outcomes["a"].reason) == ("failed", "preempted")
    assert receiver.poll()[0].reason == "preempted"
    world.sender.abort("a", "too late")  # no-op
    world.sender.abort("never", "unknown")
    world.step()
    world.assert_nothing_is_held()


def test_an_abort_before_anyone_asks_returns_the_pages_and_answers_later() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 20)
    world.sender.abort("a", "preempted")
    world.step()
    assert world.outcomes["a"].status == "failed"
    receiver.ask("a", 20)
    world.step()
    (result,) = receiver.poll()
    assert (result.status, result.reason) == ("failed", "the request has ended: preempted")


def test_a_receiver_cancels_what_moves() -> None:
    world, receiver = sending(policy=held)
    receiver.tell(Cancel("a", 2, "another attempt's"))
    receiver.tell(Cancel("b", 1, "unknown"))
    world.step()
    assert world.sender.in_doubt() == {}
    receiver.tell(Cancel("a", 1, "client left"))
    world.step()
    for index in (0, 1):
        world.network.finish(index)
    world.step()
    assert world.outcomes["a"].reason == "canceled by receiver: client left"
    assert receiver.poll()[0].status == "failed"
    receiver.tell(Cancel("a", 1, "again"))
    world.step()
    assert receiver.poll() == []
    world.assert_nothing_is_held()


def test_a_receiver_cancels_before_the_offer() -> None:
    world = World()
    receiver = world.receiver()
    receiver.ask("a", 20, slices=(0, 2))
    world.step()
    receiver.tell(Cancel("a", 1, "client left"))
    world.step()
    assert receiver.poll()[0].status == "failed"
    world.offer("a", 20)
    world.step()
    assert "client left" in world.outcomes["a"].reason
    receiver.ask("a", 20, slices=(1, 2))
    world.step()
    assert receiver.poll()[0].status == "failed"
    world.assert_nothing_is_held()


def test_a_repeated_request_is_answered_once() -> None:
    world = World(policy=held)
    receiver = world.receiver()
    receiver.ask("a", 37)
    receiver.ask("a", 37)
    world.step()
    world.offer("a", 37)
    receiver.ask("a", 37)
    world.step()
    assert len(world.starts) == 2
    for index in (0, 1):
        world.network.finish(index)
    world.step()
    receiver.ask("a", 37)
    world.step()
    assert [one.status for one in receiver.poll()] == ["done"]


def test_a_second_attempt_does_not_disturb_the_first() -> None:
    world = World(policy=held)
    first, second = world.receiver("first"), world.receiver("second")
    world.offer("a", 37)
    first.ask("a", 37)
    world.step()
    second.ask("a", 37)
    first.ask("a", 37, attempt=2)
    world.step()
    assert second.poll()[0].status == "failed"
    assert [(one.attempt, one.status) for one in first.poll()] == [(2, "failed")]
    for index in (0, 1):
        world.network.finish(index)
    world.step()
    assert [(one.attempt, one.status) for one in first.poll()] == [(1, "done")]


def test_an_unknown_request_waits_for_its_offer_and_expires_after_120_seconds() -> None:
    world = World()
    receiver = world.receiver()
    receiver.ask("a", 20)
    world.step()
    world.clock.now += 119.9
    world.step()
    assert receiver.poll() == []
    assert world.sender.use().num_unclaimed == 1
    world.clock.now += 0.1
    world.step()
    (result,) = receiver.poll()
    assert (result.status, result.reason) == ("failed", "not offered within 120 s")
    world.assert_nothing_is_held()


def test_an_offer_that_nobody_asks_for_expires_after_120_seconds() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 20, computed=8)
    world.clock.now += 100
    world.sender.advance("a", 20)
    world.clock.now += 119.9
    world.step()
    assert world.outcomes == {}
    world.clock.now += 0.1
    world.step()
    assert world.outcomes["a"].reason == "not asked for within 120 s"
    receiver.ask("a", 20)
    world.step()
    assert receiver.poll()[0].status == "failed"
    world.assert_nothing_is_held()


def test_an_offer_whose_last_slices_are_never_asked_for_expires() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 20)
    receiver.ask("a", 20, receiver.side.pages(20)[:1], slices=(0, 2))
    world.step()
    world.clock.now += UNCLAIMED_SECONDS
    world.step()
    assert world.outcomes["a"].status == "failed"


def test_a_claimed_slice_does_not_expire_while_its_tokens_are_computed() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 20, computed=0)
    receiver.ask("a", 20)
    world.clock.now += 10_000
    world.step()
    assert world.outcomes == {}
    world.sender.advance("a", 20)
    world.step()
    assert world.outcomes["a"].status == "done"


def test_a_transfer_that_stalls_is_reported_and_keeps_its_pages() -> None:
    world, receiver = sending(policy=held)
    world.clock.now += 120
    world.step()
    assert world.sender.in_doubt() == {"a": "no end within 120 s"}
    assert world.outcomes == {}
    assert receiver.poll() == []
    for index in (0, 1):
        world.network.finish(index)
    world.step()
    assert world.outcomes["a"].status == "failed"
    world.assert_nothing_is_held()


def test_an_id_may_come_again_after_its_end_is_forgotten() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 20)
    receiver.ask("a", 20)
    world.step()
    with pytest.raises(InvalidArgument, match="new one"):
        world.offer("a", 20)
    world.clock.now += UNCLAIMED_SECONDS
    world.step()
    del world.outcomes["a"]
    world.offer("a", 20)
    receiver.ask("a", 20, attempt=2)
    world.step()
    assert world.outcomes["a"].status == "done"
