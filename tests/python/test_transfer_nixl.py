"""NIXL between processes, over UCX on loopback."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.transfer import nixl
from sparse_kvcm.transfer.sender import Outcome, Sender
from sparse_kvcm.transfer.transport import PeerLostError, Region, Route, TransferState
from transfer_nixl_process import hold, receive, slots_of, source_side, wait

try:
    nixl.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

REQUESTS = {"a": (0, 61), "b": (1, 8), "c": (2, 33)}


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


class Meeting:
    """A sender here, and receivers in processes."""

    def __init__(self) -> None:
        self.source = source_side()
        self.transport = nixl.NixlTransport("sender")
        self.sender = Sender(self.transport, self.source.table)
        self.outcomes: dict[str, Outcome] = {}
        self.processes: list[BaseProcess] = []

    def start(self, name: str, requests: dict[str, tuple[int, int]]) -> Connection:
        """Start a receiver, and let it ask."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=receive, args=(theirs, name, requests), daemon=True)
        process.start()
        self.processes.append(process)
        self.sender.add_peer(self.read(ours))
        ours.send(self.sender.card())
        assert self.read(ours) == "asked"
        return ours

    def read(self, pipe: Connection) -> object:
        wait(lambda: pipe.poll(0.01))
        return pipe.recv()

    def offer(self, name: str, index: int, tokens: int) -> None:
        pages = self.source.pages(tokens, slots_of(index))
        self.source.write(name, pages, tokens)
        self.sender.offer(name, tokens, pages)

    def finish(self, names: set[str]) -> None:
        def done() -> bool:
            self.outcomes.update((one.request_id, one) for one in self.sender.progress())
            return names <= set(self.outcomes)

        wait(done)

    def close(self) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.sender.close()
        self.transport.close()


def test_requests_land_in_another_process() -> None:
    meeting = Meeting()
    pipe = meeting.start("receiver", REQUESTS)
    pipe.send("go on")
    for name, (index, tokens) in REQUESTS.items():
        meeting.offer(name, index, tokens)
    meeting.finish(set(REQUESTS))
    assert {one.status for one in meeting.outcomes.values()} == {"done"}
    assert meeting.read(pipe) == "landed"
    meeting.close()


def test_a_receiver_that_died_costs_its_own_requests_only() -> None:
    meeting = Meeting()
    dying = meeting.start("dying", {"lost": (3, 61)})
    living = meeting.start("living", {"a": (0, 61)})
    wait(lambda: meeting.sender.progress() == [] and meeting.sender.use().num_unclaimed == 2)
    dying.send("die")
    living.send("go on")
    meeting.processes[0].join(30)
    meeting.offer("lost", 3, 61)
    meeting.offer("a", 0, 61)
    meeting.finish({"lost", "a"})
    assert meeting.outcomes["a"].status == "done"
    assert meeting.outcomes["lost"].status == "failed"
    assert meeting.read(living) == "landed"
    meeting.sender.remove_peer("dying")
    meeting.sender.progress()
    meeting.close()


def test_a_transfer_ends_when_its_peer_is_killed_amid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "tcp,self,cuda_copy" if kvcm.cuda_is_available() else "tcp,self"
    monkeypatch.setenv("UCX_TLS", slow)  # else all of it is copied while it starts
    size = 256 << 20
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, size), daemon=True)
    process.start()
    wait(lambda: pipe.poll(0.01))
    metadata, address = pipe.recv()
    memory = np.zeros(size, np.uint8)
    transport = nixl.NixlTransport("sender")
    registration = transport.register([Region(memory.ctypes.data, size, "DRAM")])
    transport.add_peer(metadata)
    ranges = np.array([[memory.ctypes.data, address, size]], np.uint64)
    handle = transport.prepare("held", Route("DRAM", "DRAM"), ranges)
    transport.start(handle)
    process.kill()
    process.join()
    wait(lambda: transport.poll(handle) is not TransferState.PENDING)
    assert transport.poll(handle) is TransferState.FAILED
    transport.release(handle)
    transport.deregister(registration)
    with pytest.raises(PeerLostError):
        transport.send("held", b"hello")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("nixl_of_nobody",))
    with pytest.raises(ImportError, match="nixl-cu13==1.5.1"):
        nixl.NixlTransport("a")
