"""What every transport promises, of those that are here: two ends in one process, host memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from sparse_kvcm.transfer import nixl
from sparse_kvcm.transfer.in_process import InProcessTransport, Network
from sparse_kvcm.transfer.transport import (
    PeerLostError,
    Region,
    Route,
    TransferRefusedError,
    TransferState,
    Transport,
)

ROUTE = Route("DRAM", "DRAM")
SIZE = 1 << 16
PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("nothing has come")


class Pair:
    """Two ends that have met, with registered memory."""

    def __init__(self, ours: Transport, theirs: Transport) -> None:
        self.ours, self.theirs = ours, theirs
        self.source = np.arange(SIZE, dtype=np.uint32).view(np.uint8)[:SIZE].copy()
        self.target = np.zeros(SIZE, np.uint8)
        self.registrations = [
            end.register([Region(memory.ctypes.data, SIZE, "DRAM")])
            for end, memory in ((ours, self.source), (theirs, self.target))
        ]
        assert ours.add_peer(theirs.metadata()) == theirs.name
        assert theirs.add_peer(ours.metadata()) == ours.name

    def ranges(self, *triples: tuple[int, int, int]) -> np.ndarray:
        """Offsets within both memories, and bytes."""
        base = (self.source.ctypes.data, self.target.ctypes.data, 0)
        return np.array([np.add(one, base) for one in triples], np.uint64)

    def prepare(self, *triples: tuple[int, int, int]):
        return self.ours.prepare(self.theirs.name, ROUTE, self.ranges(*triples))


@pytest.fixture(params=["in_process", "nixl"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "in_process":
        network = Network()
        return Pair(InProcessTransport(network, "ours"), InProcessTransport(network, "theirs"))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    try:
        nixl.load()
    except ImportError as error:
        pytest.skip(str(error))
    return Pair(nixl.NixlTransport("ours"), nixl.NixlTransport("theirs"))


def test_ranges_move_and_nothing_else(pair: Pair) -> None:
    triples = [(0, 100, 50), (4096, 0, 100), (SIZE - 8, SIZE - 8, 8)]
    expected = np.zeros(SIZE, np.uint8)
    for here, there, size in triples:
        expected[there : there + size] = pair.source[here : here + size]
    handle = pair.prepare(*triples)
    assert not pair.target.any()
    assert pair.ours.poll(handle) is PENDING
    pair.ours.start(handle)
    wait(lambda: pair.ours.poll(handle) is not PENDING)
    assert pair.ours.poll(handle) is DONE
    assert (pair.target == expected).all()
    pair.ours.release(handle)


OUTSIDE = [
    (0, SIZE - 8, 16),
    (SIZE - 8, 0, 16),
    (0, -8, 16),
    (-8, 0, 16),
    (0, 0, 0),
    (0, 0, 1 << 40),
]


def test_a_range_outside_of_registered_memory_is_refused(pair: Pair) -> None:
    for triple in OUTSIDE:
        with pytest.raises(TransferRefusedError):
            pair.prepare((0, 0, 64), triple)
    assert not pair.target.any()


@pytest.mark.parametrize("side", [0, 1])
def test_a_range_at_the_end_of_64_bits_is_refused(pair: Pair, side: int) -> None:
    for address in (0, 2**63, 2**64 - 1):
        for size in (1, 4096, 2**63, 2**64 - 1):
            ranges = pair.ranges((0, 0, 64))
            ranges[0, side], ranges[0, 2] = address, size
            with pytest.raises(TransferRefusedError):
                pair.ours.prepare("theirs", ROUTE, ranges)


def test_memory_of_another_type_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferRefusedError):
        pair.ours.prepare("theirs", Route("VRAM", "DRAM"), pair.ranges((0, 0, 64)))


def test_a_peer_that_is_not_there_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferRefusedError):
        pair.ours.prepare("nobody", ROUTE, pair.ranges((0, 0, 64)))
    with pytest.raises(PeerLostError):
        pair.ours.send("nobody", b"hello")
    pair.ours.remove_peer("theirs")
    pair.ours.remove_peer("theirs")
    with pytest.raises(TransferRefusedError):
        pair.prepare((0, 0, 64))
    with pytest.raises(PeerLostError):
        pair.ours.send("theirs", b"hello")


def test_metadata_of_nobody_is_refused(pair: Pair) -> None:
    for metadata in (b"", b"garbage", b"\xff" * 500):
        with pytest.raises(TransferRefusedError):
            pair.ours.add_peer(metadata)


def test_a_prepared_transfer_that_is_canceled_never_moves(pair: Pair) -> None:
    handle = pair.prepare((0, 0, 64))
    with pytest.raises(TransferRefusedError):
        pair.ours.release(handle)
    pair.ours.cancel(handle)
    pair.ours.cancel(handle)
    assert pair.ours.poll(handle) is FAILED
    pair.ours.release(handle)
    assert not pair.target.any()
    with pytest.raises(TransferRefusedError):
        pair.ours.poll(handle)


def test_a_registration_stays_while_a_handle_may_use_it(pair: Pair) -> None:
    handle = pair.prepare((0, 0, 64))
    with pytest.raises(TransferRefusedError):
        pair.ours.deregister(pair.registrations[0])
    pair.ours.start(handle)
    wait(lambda: pair.ours.poll(handle) is DONE)
    pair.ours.release(handle)
    pair.ours.deregister(pair.registrations[0])
    with pytest.raises(TransferRefusedError):
        pair.prepare((0, 0, 64))


def test_messages_arrive_whole_in_order_and_once(pair: Pair) -> None:
    sent = [b"", b"\x00\xff", b"one", bytes(1 << 20), b"two", *[b"%d" % i for i in range(50)]]
    for message in sent:
        pair.ours.send("theirs", message)
    got: list[tuple[str, bytes]] = []

    def all_there() -> bool:
        got.extend(pair.theirs.receive())
        return len(got) >= len(sent)

    wait(all_there)
    assert got == [("ours", message) for message in sent]
    assert pair.theirs.receive() == []


def test_a_message_comes_after_the_bytes_before_it(pair: Pair) -> None:
    for turn in range(20):
        pair.source[:] = turn + 1
        handle = pair.prepare((0, 0, SIZE))
        pair.ours.start(handle)
        wait(lambda handle=handle: pair.ours.poll(handle) is DONE)
        pair.ours.release(handle)
        pair.ours.send("theirs", b"done")
        wait(pair.theirs.receive)
        assert (pair.target == turn + 1).all()


def test_a_peer_may_be_met_again(pair: Pair) -> None:
    more = np.zeros(64, np.uint8)
    pair.theirs.register([Region(more.ctypes.data, 64, "DRAM")])
    assert pair.ours.add_peer(pair.theirs.metadata()) == "theirs"
    ranges = np.array([[pair.source.ctypes.data, more.ctypes.data, 64]], np.uint64)
    handle = pair.ours.prepare("theirs", ROUTE, ranges)
    pair.ours.start(handle)
    wait(lambda: pair.ours.poll(handle) is DONE)
    pair.ours.release(handle)
    assert (more == pair.source[:64]).all()
