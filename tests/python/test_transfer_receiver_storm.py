"""Random schedules of a receiver: whatever fails, nothing leaks and what arrives is right."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from sparse_kvcm._core import InvalidArgument

from receiver_cases import DsaModel, Pair, V4Model, make_bounce
from sparse_kvcm.transfer.attempts import ReceiverOptions, ReceiverUse
from sparse_kvcm.transfer.copier import Copier, Copy, HostCopier
from sparse_kvcm.transfer.in_process import InProcessTransport
from sparse_kvcm.transfer.sender import Sender
from sparse_kvcm.transfer.target import NoRoomError
from sparse_kvcm.transfer.transport import Ranges

SCHEDULES = 500
TURNS = 14
ROOM = {"dsa": 30_000, "v4": 300_000}  # of one or two requests
LENGTHS = {"dsa": {1: 61, 2: 40, 3: 9, 4: 33}, "v4": {1: 401, 2: 260, 3: 3, 4: 129}}


class Storm:
    """One target and one prefilled source; each schedule has two senders of its own."""

    def __init__(self, kind: str) -> None:
        model = DsaModel() if kind == "dsa" else V4Model()
        options = ReceiverOptions(slice_pages=2, max_in_flight=3, max_queued=1, num_workers=1)
        self.copier = MoodyCopier()
        bounce = make_bounce(self.copier, ROOM[kind])
        self.pair = Pair(model, staging=3, options=options, bounce=bounce, source_memory="VRAM")
        self.lengths = LENGTHS[kind]
        manager, self.source = self.pair.sources[0]
        for request, tokens in self.lengths.items():
            model.fill(manager, request, tokens)
        self.pair.receiver.remove_peer("prefill0")
        self.pair.senders.clear()
        self.num_complete = 0

    def schedule(self, seed: int) -> None:
        pair, rng = self.pair, np.random.default_rng(seed)
        pair.network.policy = lambda transfer: hurt(transfer, rng)
        self.copier.rng = rng
        pair.results.clear()
        senders = {name: self.sender(name) for name in (f"a{seed}", f"b{seed}")}
        alive = dict(senders)
        asked: dict[int, str] = {}
        for _ in range(TURNS):
            request = int(rng.choice(list(self.lengths)))
            act = rng.choice(["ask", "ask", "offer", "offer", "offer", "cancel", "abort", "kill"])
            name = asked.get(request) or str(rng.choice(list(senders)))
            wire = f"{seed}-{request}"
            if act == "ask":
                self.ask(asked, request, name, wire)
            elif act == "cancel":
                pair.receiver.cancel(wire, "a whim")
            elif act == "kill" and rng.random() < 0.3 and len(alive) == 2:
                self.kill(name)
                del alive[name]
            elif name in alive:
                self.at_sender(str(act), alive[name], request, wire)
            self.turn(alive, float(rng.choice([0, 0, 0, 50])))
        self.drain(alive)
        self.settle(seed)
        for name in senders:
            pair.receiver.remove_peer(name)
            pair.network.ends.pop(name, None)

    def sender(self, name: str) -> Sender:
        sender = Sender(
            InProcessTransport(self.pair.network, name),
            self.source.table,
            bounce=make_bounce(self.copier, ROOM["v4"]),
            clock=self.pair.clock,
        )
        sender.add_peer(self.pair.receiver.card())
        self.pair.receiver.add_peer(sender.card())
        return sender

    def ask(self, asked: dict[int, str], request: int, name: str, wire: str) -> None:
        tokens = self.lengths[request]
        # Asked for twice, or the peer is gone; no room.
        with contextlib.suppress(InvalidArgument, NoRoomError):
            self.pair.receiver.request(name, wire, request, tokens, tokens + 8)
            asked[request] = name

    def at_sender(self, act: str, sender: Sender, request: int, wire: str) -> None:
        if act == "abort":
            sender.abort(wire, "a whim of the prefill")
            return
        with contextlib.suppress(InvalidArgument):  # offered before
            sender.offer(wire, self.lengths[request], self.source.pages(request))

    def kill(self, name: str) -> None:
        network = self.pair.network
        network.kill(name)
        kept = {i: one for i, one in network.transfers.items() if one.source != name}
        network.transfers = kept
        self.pair.receiver.remove_peer(name, "killed")

    def turn(self, alive: dict[str, Sender], seconds: float = 0.0) -> None:
        self.pair.now += seconds
        for sender in alive.values():
            sender.progress()
        self.pair.results += self.pair.receiver.poll()

    def drain(self, alive: dict[str, Sender]) -> None:
        """Everything has an end: to be queued, each of at most five slices, and to drain."""
        end = self.pair.now + 8 * 121
        while self.pair.receiver.use != ReceiverUse():
            for _ in range(60):
                self.turn(alive)
            if self.pair.receiver.use.repacking:  # threads have a time of their own
                hung = time.monotonic() + 60
                while self.pair.receiver.use.repacking:
                    time.sleep(0.001)
                    self.turn(alive)
                    assert time.monotonic() < hung, self.pair.receiver.use
                continue
            self.pair.now += 40
            assert self.pair.now < end, self.pair.receiver.use
        self.pair.results += self.pair.receiver.poll()

    def settle(self, seed: int) -> None:
        complete = [one.key for one in self.pair.results if not one.reason]
        self.num_complete += len(complete)
        rows = self.pair.target_manager.config.max_batch_size
        if complete:
            self.pair.check({key: self.lengths[key] for key in complete[:rows]})
        for key in complete:
            self.pair.target_manager.free_request(key)
        assert self.pair.occupancy() == self.pair.fresh, f"seed {seed}"


class MoodyCopier(Copier):
    """Takes its time, and fails now and then."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.num_done = 0

    def start(self, ranges: Ranges) -> Copy:
        if self.rng.random() < 0.02:
            raise RuntimeError("a whim of the stream")
        return MoodyCopy(self, ranges, int(self.rng.integers(0, 4)))


@dataclass
class MoodyCopy:
    """Copies at its last query."""

    copier: MoodyCopier
    ranges: Ranges
    queries_left: int

    def query(self) -> bool:
        if self.queries_left == 0:
            HostCopier().start(self.ranges)
            self.copier.num_done += 1
        self.queries_left -= 1
        return self.queries_left < 0


def hurt(transfer: Any, rng: np.random.Generator) -> None:
    transfer.polls_left = int(rng.integers(0, 5))
    transfer.fails = rng.random() < 0.05
    transfer.poll_errors = int(rng.random() < 0.05)
    if rng.random() < 0.03:
        transfer.start_error = RuntimeError("a whim of the engine")


@pytest.mark.parametrize("kind", LENGTHS)
def test_random_schedules_leave_nothing_behind_and_right_bytes(kind: str) -> None:
    storm = Storm(kind)
    for seed in range(SCHEDULES):
        storm.schedule(seed)
    assert storm.num_complete > SCHEDULES // 4
    assert storm.copier.num_done > SCHEDULES // 4
    storm.pair.end()
