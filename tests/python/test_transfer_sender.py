"""Requests from offer to outcome: memory types, groups, slices, and who owns pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_kvcm import InvalidArgument
from sparse_kvcm.transfer.wire import PageList
from transfer_cases import check_landed
from transfer_world import KINDS, World, held, sending

TYPES = ("VRAM", "DRAM")


class Event:
    """When pages are written."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (16, 8)])
@pytest.mark.parametrize("there", TYPES)
@pytest.mark.parametrize("here", TYPES)
def test_a_request_lands_between_any_two_memory_types(here: str, there: str, sizes) -> None:
    kinds = [replace(kind, memory=here) for kind in KINDS]
    landing = [replace(kind, memory=there) for kind in KINDS]
    world, receiver = sending(kinds=kinds, landing=landing, sizes=sizes)
    (result,) = receiver.poll()
    assert (result.status, result.request_id, result.attempt, result.slice_id) == (
        "done",
        "a",
        1,
        0,
    )
    (group,) = result.transfer_groups
    assert (group.source, group.target, group.bounce_dst_base) == (here, there, None)
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)
    assert world.outcomes["a"].status == "done"
    world.assert_nothing_is_held()


def test_groups_of_a_slice_are_submitted_together_and_end_in_any_order() -> None:
    world, receiver = sending(policy=held)
    assert world.network.log == [("prepare", 0), ("prepare", 1), ("start", 0), ("start", 1)]
    world.network.finish(1)
    world.step()
    assert world.network.log[4:] == [("done", 1), ("release", 1)]
    assert receiver.poll() == []
    assert world.outcomes == {}
    world.network.finish(0)
    world.step()
    (result,) = receiver.poll()
    assert result.status == "done"
    assert {(one.source, one.target) for one in result.transfer_groups} == {
        ("VRAM", "DRAM"),
        ("VRAM", "VRAM"),
    }
    assert world.outcomes["a"].status == "done"


def test_transfers_of_many_requests_overlap() -> None:
    world = World(policy=held, num_slots=32)
    receiver = world.receiver()
    for index, name in enumerate("abc"):
        slots = range(8 * index, 8 * index + 8)
        world.offer(name, 37, slots)
        receiver.ask(name, 37, receiver.side.pages(37, slots))
    world.step()
    assert len(world.starts) == 6  # before any has ended
    for index in (5, 0, 4, 1):
        world.network.finish(index)
    world.step()
    assert set(world.outcomes) == {"a", "c"}
    for index in (2, 3):
        world.network.finish(index)
    world.step()
    assert world.outcomes["b"].status == "done"


@pytest.mark.parametrize("order", ["offer first", "request first"])
def test_offer_and_request_meet_in_either_order(order: str) -> None:
    world = World()
    receiver = world.receiver()
    if order == "offer first":
        world.offer("a", 20)
        world.step()
        receiver.ask("a", 20)
    else:
        receiver.ask("a", 20)
        world.step()
        world.offer("a", 20)
    world.step()
    assert world.outcomes["a"].status == "done"


def test_slices_are_sent_as_their_tokens_are_computed_and_echo_their_ids() -> None:
    world = World()
    receiver = world.receiver()
    pages, wanted = world.source.pages(40), receiver.side.pages(40)
    world.source.write("a", pages, 40)
    world.sender.offer("a", 40, pages[:2], computed=0)
    for index, span in enumerate([(30, 40), (0, 13), (13, 30)]):
        receiver.ask("a", 40, wanted, span=span, slices=(index, 3))
    world.step()
    assert receiver.poll() == []
    world.sender.advance("a", 16)
    world.step()
    assert [one.slice_id for one in receiver.poll()] == [1]
    world.sender.advance("a", 40, pages[2:])  # windows come when they are final
    world.step()
    assert sorted(one.slice_id for one in receiver.poll()) == [0, 2]
    check_landed("a", world.source, receiver.side, wanted, 40)
    assert world.outcomes["a"].status == "done"
    world.assert_nothing_is_held()


def test_a_slice_that_is_done_retires_and_the_request_with_its_last() -> None:
    world = World(policy=held)
    receiver = world.receiver()
    world.offer("a", 40)
    wanted = receiver.side.pages(40)[:1]
    for index, span in enumerate([(0, 16), (16, 32), (32, 40)]):
        receiver.ask("a", 40, wanted, span=span, slices=(index, 3))
    world.step()
    for left, index in ((2, 1), (1, 2)):
        world.network.finish(index)
        world.step()
        assert [one.slice_id for one in receiver.poll()] == [index]
        assert world.sender.use().num_handles == left  # those of the others
        assert world.sender.use().num_offers == 1
        with pytest.raises(InvalidArgument, match="new one"):
            world.offer("a", 40)
    world.network.finish(0)
    world.step()
    assert world.outcomes["a"].status == "done"
    world.assert_nothing_is_held()


def test_a_slice_may_name_some_layer_groups_only() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 40)
    wanted = receiver.side.pages(40)
    receiver.ask("a", 40, wanted[1:], slices=(0, 3))
    receiver.ask("a", 40, [PageList.of(0, 0, [0])], span=(0, 16), slices=(1, 3))
    receiver.ask("a", 40, [PageList.of(0, 1, [1, 2])], span=(16, 40), slices=(2, 3))
    world.step()
    assert [one.status for one in receiver.poll()] == ["done"] * 3
    check_landed("a", world.source, receiver.side, wanted, 40)


def test_a_slice_with_nothing_to_send_is_done_without_groups() -> None:
    world = World()
    receiver = world.receiver()
    world.offer("a", 40)
    windows = receiver.side.pages(40)[2:]
    receiver.ask("a", 40, windows, span=(0, 8), slices=(0, 2))
    world.step()
    (result,) = receiver.poll()
    assert (result.status, result.transfer_groups) == ("done", ())


def test_a_slice_waits_for_the_event_behind_its_tokens() -> None:
    world = World()
    receiver = world.receiver()
    first, second = Event(), Event()
    world.offer("a", 40, computed=20, ready=first)
    world.sender.advance("a", 40, ready=second)
    receiver.ask("a", 40, receiver.side.pages(40)[:2], span=(0, 16), slices=(0, 2))
    receiver.ask("a", 40, span=(16, 40), slices=(1, 2))
    world.step()
    assert world.starts == []
    first.passed = True
    world.step()
    assert [one.slice_id for one in receiver.poll()] == [0]
    second.passed = True
    world.step()
    assert [one.slice_id for one in receiver.poll()] == [1]


def test_an_event_that_fails_fails_its_request_alone() -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("device lost")

    world = World()
    receiver = world.receiver()
    world.offer("a", 20, ready=Broken())
    world.offer("b", 20)
    receiver.ask("a", 20)
    receiver.ask("b", 20)
    world.step()
    assert (world.outcomes["a"].status, world.outcomes["b"].status) == ("failed", "done")
    assert "device lost" in world.outcomes["a"].reason


def test_pages_that_were_given_cannot_change() -> None:
    world = World()
    pages = world.source.pages(40)
    world.sender.offer("a", 40, [PageList.of(0, 1, [4, 5])], computed=8)
    for bad in ([PageList.of(0, 1, [4])], [PageList.of(0, 2, [5])], [PageList.of(0, 1, [5, 4])]):
        with pytest.raises(InvalidArgument, match="belong to the transfer"):
            world.sender.advance("a", 16, bad)
    world.sender.advance("a", 16, [PageList.of(0, 0, [9, 4, 5, 6])])
    with pytest.raises(InvalidArgument, match="computed must be an int in"):
        world.sender.advance("a", 15)
    with pytest.raises(InvalidArgument, match="slots of layer group 1"):
        world.sender.advance("a", 16, [PageList.of(1, 0, [16])])
    with pytest.raises(InvalidArgument, match="new one"):
        world.sender.offer("a", 40, pages)
    with pytest.raises(InvalidArgument, match="offered"):
        world.sender.advance("b", 16)


@pytest.mark.parametrize(
    "slots", [[1.0, 2.0], [0.5], [True], [1 << 31], [-(1 << 31) - 1], [[1, 2]], ["1"]]
)
def test_a_page_list_of_anything_but_slots_is_refused(slots: object) -> None:
    with pytest.raises(InvalidArgument, match=r"\[PageList.of\] slots must be"):
        PageList.of(0, 0, slots)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1.0, True, None])
@pytest.mark.parametrize("name", ["layer_group", "first_page"])
def test_a_page_list_says_where_its_pages_are_in_integers(name: str, bad: object) -> None:
    where = {"layer_group": 0, "first_page": 0} | {name: bad}
    with pytest.raises(InvalidArgument, match=rf"\[PageList.of\] {name} must be an int"):
        PageList.of(slots=[1], **where)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"\[Sender\] {name} must be an int"):
        World().sender.offer("a", 20, [PageList(packed=b"\0" * 4, **where)])  # type: ignore[arg-type]


def test_an_offer_that_names_a_layer_group_twice_or_no_whole_tokens_changes_nothing() -> None:
    world = World()
    pages = world.source.pages(20)
    with pytest.raises(InvalidArgument, match="name a layer group once, got 1 twice"):
        world.sender.offer("a", 20, [*pages, pages[1]])
    with pytest.raises(InvalidArgument, match="prompt_tokens must be an int"):
        world.sender.offer("a", 20.0, pages)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="computed must be an int"):
        world.sender.offer("a", 20, pages, computed=8.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="packed must be bytes"):
        world.sender.offer("a", 20, [PageList(0, 0, b"abc")])
    assert world.sender.use().num_offers == 0
    world.offer("a", 20)
    with pytest.raises(InvalidArgument, match="twice"):
        world.sender.advance("a", 20, [pages[0], pages[0]])
    world.sender.abort("a", "the test ends")
    world.step()
    world.assert_nothing_is_held()
