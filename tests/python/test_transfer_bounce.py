"""The bounce region: small pages between GPUs gather; whatever touches a host goes past it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse_kvcm import InvalidArgument
from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.copier import Copier, Copy, HostCopier
from sparse_kvcm.transfer.transport import Ranges, Region
from sparse_kvcm.transfer.wire import BounceGrant
from transfer_cases import check_landed
from transfer_world import KINDS, World, held


class SlowCopier(Copier):
    """Copies when it is told to, or fails."""

    def __init__(self) -> None:
        self.passed = False
        self.error: Exception | None = None
        self.waiting: Ranges | None = None

    def start(self, ranges: Ranges) -> Copy:
        if self.error is not None:
            raise self.error
        self.waiting = ranges
        return self

    def query(self) -> bool:
        if self.passed and self.waiting is not None:
            HostCopier().start(self.waiting)
            self.waiting = None
        return self.passed


def test_small_pages_between_gpus_are_one_range_and_land() -> None:
    world = World(landing=KINDS, bounce_bytes=1 << 16)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant)
    world.step(2)
    (result,) = receiver.poll()
    (group,) = result.transfer_groups
    assert (group.num_ranges, group.bounce_dst_base) == (1, receiver.grant.address)
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)
    world.assert_nothing_is_held()


@pytest.mark.parametrize(("here", "there"), [("VRAM", "DRAM"), ("DRAM", "VRAM"), ("DRAM", "DRAM")])
def test_groups_that_touch_a_host_bypass_it(here: str, there: str) -> None:
    kinds = [replace(KINDS[0], memory=here), *KINDS[1:]]
    landing = [replace(KINDS[0], memory=there), *KINDS[1:]]
    world = World(kinds=kinds, landing=landing, bounce_bytes=1 << 16)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant)
    world.step(2)
    (result,) = receiver.poll()
    found = {(one.source, one.target): one.bounce_dst_base for one in result.transfer_groups}
    assert found == {(here, there): None, ("VRAM", "VRAM"): receiver.grant.address}
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)


@pytest.mark.parametrize(
    ("how", "grant_bytes"),
    [({"min_bytes": 1 << 20}, 1 << 16), ({}, 0), ({}, 64), ({"bounce_bytes": 64}, 1 << 16)],
)
def test_without_room_or_need_pages_go_directly(how: dict, grant_bytes: int) -> None:
    world = World(landing=KINDS, **{"bounce_bytes": 1 << 16, **how})
    receiver = world.receiver()
    memory = np.zeros(1 << 16, np.uint8)
    receiver.transport.register([Region(memory.ctypes.data, memory.nbytes, "VRAM")])
    grant = BounceGrant(memory.ctypes.data, grant_bytes) if grant_bytes else None
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=grant)
    world.step()
    (result,) = receiver.poll()
    assert [one.bounce_dst_base for one in result.transfer_groups] == [None]
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)
    world.assert_nothing_is_held()


def test_a_gather_runs_beside_the_other_groups() -> None:
    copier = SlowCopier()
    world = World(bounce_bytes=1 << 16, copier=copier)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant)
    world.step()
    assert world.network.log.count(("done", 0)) == 1  # history
    assert len(world.starts) == 1
    copier.passed = True
    world.step(2)
    assert receiver.poll()[0].status == "done"
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)


def test_a_region_stays_taken_while_its_transfer_is_in_doubt() -> None:
    world = World(landing=KINDS, bounce_bytes=1 << 16, policy=held)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant)
    world.step(2)
    taken = world.sender.use().bounce_bytes
    world.network.transfers[0].poll_errors = 2
    world.sender.abort("a", "preempted")
    world.step()
    assert world.sender.use().bounce_bytes == taken > 0
    world.network.finish(0)
    world.step(2)
    assert world.outcomes["a"].status == "failed"
    world.assert_nothing_is_held()


@pytest.mark.parametrize("when", ["start", "abort"])
def test_a_gather_that_fails_or_is_aborted_sends_nothing(when: str) -> None:
    copier = SlowCopier()
    copier.error = RuntimeError("no stream") if when == "start" else None
    world = World(landing=KINDS, bounce_bytes=1 << 16, copier=copier)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant)
    world.step()
    if when == "abort":
        world.sender.abort("a", "preempted")
        world.step()
        assert world.sender.use().bounce_bytes > 0  # the copies still run
        copier.passed = True
    world.step()
    assert world.outcomes["a"].status == "failed"
    assert world.starts == []
    world.assert_nothing_is_held()


def test_room_is_taken_first_fit_and_returned() -> None:
    bounce = Bounce(Region(4096, 1024, "VRAM"), HostCopier())
    first, second, third = bounce.take(300), bounce.take(300), bounce.take(256)
    assert (first, second, third) == (4096, 4096 + 512, None)
    bounce.give_back(first)
    assert bounce.take(257) == 4096
    assert bounce.take(600) is None
    assert bounce.bytes_in_use == 557


def test_a_region_of_host_memory_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="VRAM"):
        Bounce(Region(4096, 1024, "DRAM"), HostCopier())
