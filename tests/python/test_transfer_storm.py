"""Random schedules of everything that may go wrong: nothing leaks, nothing lands where it must not.

Pages are reused as soon as they may be: the source scribbles over those of an outcome, the receiver
over those of its results. A byte that moved later would show.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from sparse_kvcm.transfer.in_process import Transfer
from sparse_kvcm.transfer.wire import Cancel, PageList
from transfer_cases import POISON, check_landed
from transfer_world import FakeReceiver, World

NUM_SCHEDULES = 1000
BATCH = 50
TOKENS = (5, 8, 17, 30)
SCRIBBLE = 0x77


@dataclass
class Request:
    """What the test knows of a request; its pages are its own on both sides."""

    name: str
    tokens: int
    receiver: FakeReceiver
    own: list[PageList]
    wanted: list[PageList]
    spans: list[tuple[int, int]]
    asked: set[int] = field(default_factory=set)
    statuses: dict[int, str] = field(default_factory=dict)
    offered: bool = False

    @property
    def is_done(self) -> bool:
        return len(self.statuses) == len(self.spans) and set(self.statuses.values()) == {"done"}

    @property
    def is_answered(self) -> bool:
        return set(self.statuses) == self.asked and "failed" in self.statuses.values()


class Storm:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        sizes = self.rng.choice([(8, 8), (8, 16), (16, 8)])
        self.world = World(
            policy=self.decide, sizes=sizes, num_slots=40, bounce_bytes=self.rng.choice([0, 4096])
        )
        self.receivers = [self.world.receiver(name) for name in ("one", "two")]
        self.dead: set[str] = set()
        self.ended: set[str] = set()
        self.requests = [self.make(index) for index in range(self.rng.randint(2, 6))]

    def decide(self, transfer: Transfer) -> None:
        rng = self.rng
        transfer.polls_left = rng.choice([0, 0, 1, 3, None])
        transfer.fails = rng.random() < 0.15
        transfer.start_error = RuntimeError("start") if rng.random() < 0.1 else None
        transfer.poll_errors = rng.choice([0, 0, 0, 2])

    def make(self, index: int) -> Request:
        rng, world = self.rng, self.world
        tokens, receiver = rng.choice(TOKENS), rng.choice(self.receivers)
        slots = list(range(6 * index, 6 * index + 6))
        ends = sorted({0, tokens, *(rng.randint(1, tokens) for _ in range(rng.randint(0, 2)))})
        return Request(
            f"r{index}",
            tokens,
            receiver,
            world.source.pages(tokens, slots),
            receiver.side.pages(tokens, rng.sample(slots, len(slots))),
            list(itertools.pairwise(ends)),
        )

    # --- what may happen ---

    def offer(self) -> None:
        left = [one for one in self.requests if not one.offered]
        if left:
            one = self.rng.choice(left)
            one.offered = True
            self.world.source.write(one.name, one.own, one.tokens)
            self.world.sender.offer(one.name, one.tokens, one.own, computed=one.spans[0][1])

    def advance(self) -> None:
        for one in self.requests:
            if one.offered and one.name not in self.ended:
                self.world.sender.advance(one.name, one.tokens)

    def ask(self) -> None:
        one = self.rng.choice(self.requests)
        index = self.rng.randrange(len(one.spans))
        if one.receiver.transport.name in self.dead or (
            index in one.asked and self.rng.random() < 0.7
        ):
            return
        if index in one.statuses:
            return  # its pages are in use for something else
        one.asked.add(index)
        grant = one.receiver.grant if self.world.bounce_bytes and len(one.spans) == 1 else None
        one.receiver.ask(
            one.name,
            one.tokens,
            one.wanted,
            span=one.spans[index],
            slices=(index, len(one.spans)),
            bounce=grant if self.rng.random() < 0.1 else None,
        )

    def cancel(self) -> None:
        one = self.rng.choice(self.requests)
        if one.receiver.transport.name not in self.dead:
            one.receiver.tell(Cancel(one.name, self.rng.choice([1, 2]), "client left"))

    def abort(self) -> None:
        self.world.sender.abort(self.rng.choice(self.requests).name, "preempted")

    def finish(self) -> None:
        for index, transfer in self.world.network.transfers.items():
            if transfer.polls_left is None and self.rng.random() < 0.5:
                self.world.network.finish(index)

    def wait(self) -> None:
        self.world.clock.now += self.rng.choice([1.0, 40.0, 130.0])

    def nonsense(self) -> None:
        one = self.rng.choice(self.receivers)
        if one.transport.name not in self.dead:
            one.transport.send("sender", self.rng.randbytes(self.rng.randint(0, 40)))

    def die(self) -> None:
        name = self.rng.choice(["one", "two"])
        if self.rng.random() < 0.2 and name not in self.dead:
            self.dead.add(name)
            self.world.network.kill(name)
            if self.rng.random() < 0.5:
                self.world.sender.remove_peer(name)

    # --- what must hold ---

    def step(self) -> None:
        self.world.step()
        for one in self.requests:
            if one.name in self.world.outcomes and one.name not in self.ended:
                self.ended.add(one.name)
                self.scribble(self.world.source, one.own, SCRIBBLE)
        for receiver in self.receivers:
            for result in receiver.poll():
                self.take(receiver, result)

    def take(self, receiver: FakeReceiver, result) -> None:
        one = next(one for one in self.requests if one.name == result.request_id)
        assert one.receiver is receiver
        assert result.slice_id in one.asked
        assert result.slice_id not in one.statuses, "a second result"
        one.statuses[result.slice_id] = result.status
        if one.is_answered:  # its pages are free, and become another's
            self.scribble(receiver.side, one.wanted, SCRIBBLE)

    def scribble(self, side, lists: list[PageList], value: int) -> None:
        for pages in lists:
            slots = pages.slots[pages.slots >= 0]
            side.pools[pages.layer_group][slots] = value

    def drain(self) -> None:
        """Prefills end, transfers too, and whatever still waits is given up."""
        self.advance()
        for _ in range(12):
            for index in list(self.world.network.transfers):
                self.world.network.finish(index)
            self.world.clock.now += 50
            self.step()

    def check(self) -> None:
        for one in self.requests:
            alive = one.receiver.transport.name not in self.dead
            assert not one.offered or one.name in self.world.outcomes
            assert not alive or set(one.statuses) == one.asked
            outcome = self.world.outcomes.get(one.name)
            if outcome is not None and outcome.status == "done":
                assert set(one.statuses.values()) <= {"done"}
        self.world.assert_nothing_is_held()

    def check_bytes(self) -> None:
        """What is done has landed; pages of what failed are as the receiver left them."""
        for receiver in self.receivers:
            if receiver.transport.name in self.dead:
                continue
            for one in self.requests:
                done = len(one.statuses) == len(one.spans) and set(one.statuses.values()) == {
                    "done"
                }
                if one.receiver is not receiver or not done:
                    self.scribble(receiver.side, self.pages_of(receiver, one), POISON)
            for one in self.requests:
                if one.receiver is receiver and set(one.statuses.values()) == {"done"}:
                    self.check_landed_alone(receiver, one)

    def pages_of(self, receiver: FakeReceiver, one: Request) -> list[PageList]:
        return one.wanted if one.receiver is receiver else []

    def check_landed_alone(self, receiver: FakeReceiver, one: Request) -> None:
        if len(one.statuses) != len(one.spans):
            return
        kept = [pool.copy() for pool in receiver.side.pools]
        for pool, pages in zip(receiver.side.pools, one.wanted, strict=True):
            others = np.setdiff1d(np.arange(len(pool)), pages.slots)
            pool[others] = POISON
        check_landed(one.name, self.world.source, receiver.side, one.wanted, one.tokens)
        for pool, before in zip(receiver.side.pools, kept, strict=True):
            pool[:] = before


def run(seed: int) -> Storm:
    storm = Storm(seed)
    actions = [
        *[storm.offer] * 4,
        *[storm.ask] * 8,
        *[storm.finish] * 4,
        *[storm.step] * 6,
        storm.advance,
        storm.advance,
        storm.cancel,
        storm.abort,
        storm.wait,
        storm.nonsense,
        storm.die,
    ]
    for _ in range(storm.rng.randint(20, 60)):
        storm.rng.choice(actions)()
    storm.drain()
    storm.check()
    storm.check_bytes()
    return storm


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, BATCH))
def test_no_schedule_leaks_or_misplaces(first: int) -> None:
    ends: set[str] = set()
    for seed in range(first, first + BATCH):
        try:
            storm = run(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        ends |= {one.status for one in storm.world.outcomes.values()}
    assert ends == {"done", "failed"}
