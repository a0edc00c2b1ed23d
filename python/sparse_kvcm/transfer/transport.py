"""The small interface behind which bytes move.

It is what a sender and a receiver need of NIXL, or of any engine that writes into a peer's
registered memory.

Two processes meet like this; cards travel out of band, by whatever the deployment has:

    both       registration = transport.register(regions); card with transport.metadata()
    both       peer = transport.add_peer(metadata of the other)
    sender     handle = transport.prepare(peer, route, ranges); start(handle)
               poll(handle) until it is terminal; release(handle)
    either     send(peer, message), receive()

Bytes are pushed: the side that has them writes, the other side takes no part in it. Rules that
make ownership of pages possible:

- Until a handle is terminal, its bytes may move at any moment, whatever was called. After that
  none moves, and bytes of a handle that is DONE are readable on the target.
- `prepare` moves nothing. So a handle exists before a byte does, and a `start` that raises leaves
  something that can be polled.
- Messages from one peer arrive in order, whole, once; none overtakes bytes that were DONE before
  it was sent.

One thread at a time calls a transport. Nothing in it waits for the peer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sparse_kvcm._core import InvalidArgument

MemoryType = Literal["VRAM", "DRAM"]
Ranges = npt.NDArray[np.uint64]  # [n, 3]: source address, target address, bytes
Parts = Sequence[Ranges]  # each of one pool here and there: what lies in two is never one range

Handle = Hashable
Registration = Hashable

SOURCE, TARGET, SIZE = range(3)  # columns of Ranges


class TransferRefusedError(InvalidArgument):
    """A transport does not do what it was asked to; no byte has moved on its behalf, nor will."""


class PeerLostError(RuntimeError):
    """A message cannot reach its peer."""


class TransferState(enum.Enum):
    """Where a transfer stands. DONE and FAILED are terminal."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Region:
    """Memory that a transport may read and its peers may write.

    Attributes
    ----------
    address, size : int
        Bytes [address, address + size).
    memory : {"VRAM", "DRAM"}
    device : int
        Index of the GPU; 0 for DRAM.
    """

    address: int
    size: int
    memory: MemoryType
    device: int = 0


@dataclass(frozen=True)
class Route:
    """What the memory of a transfer is, on both sides. One transfer has one route."""

    source: MemoryType
    target: MemoryType
    source_device: int = 0
    target_device: int = 0


def merged(parts: Parts) -> Ranges:
    """The same bytes in as few ranges as can be, each part by ascending source address.

    Neighbours become one where they are neighbours on both sides.
    """
    ordered = [one[np.argsort(one[:, SOURCE], kind="stable")] for one in parts]
    return np.concatenate([joined(one) for one in ordered])


def joined(ranges: Ranges) -> Ranges:
    """The same bytes in the same order: who follows its neighbour on both sides becomes one."""
    ends = ranges[:-1] + ranges[:-1, SIZE:]
    follows = (ends[:, :SIZE] == ranges[1:, :SIZE]).all(axis=1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    out = ranges[starts]
    out[:, SIZE] = np.add.reduceat(ranges[:, SIZE], starts)
    return out


def all_within(addresses: Ranges, sizes: Ranges, regions: Sequence[Region]) -> bool:
    """Whether each [address, address + size) lies within one of the regions; both uint64 (n,).

    Sums are not formed, so none can wrap around.
    """
    if not regions:
        return len(addresses) == 0
    known = sorted(regions, key=lambda one: one.address)
    starts = np.array([one.address for one in known], np.uint64)
    ends = np.maximum.accumulate(np.array([one.address + one.size for one in known], np.uint64))
    index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    end = ends[np.maximum(index, 0)]
    inside = (index >= 0) & (addresses <= end) & (sizes > 0)
    return bool(np.all(inside & (sizes <= np.where(inside, end - addresses, 0))))


class Transport(ABC):
    """One end of transfers.

    Attributes
    ----------
    name : str
        How peers call it; unique among all that meet.
    kind : str
        Of engine; ends of two kinds do not meet.
    """

    name: str
    kind: str

    # --- memory and peers ---

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> Registration:
        """Make memory known, before `metadata` is taken. All of it or nothing.

        Raises
        ------
        TransferRefusedError
            If the engine cannot take it.
        """

    @abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Forget it. Refused (`TransferRefusedError`) while a handle of ours is not released."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer's `add_peer` needs to reach what is registered now."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> str:
        """Learn of a peer; its name. Again for a known one: its metadata is renewed.

        Raises
        ------
        TransferRefusedError
            If `metadata` is not a peer's.
        """

    @abstractmethod
    def remove_peer(self, peer: str) -> None:
        """Forget a peer, its unread messages too. No-op for an unknown one."""

    # --- bytes ---

    @abstractmethod
    def prepare(self, peer: str, route: Route, ranges: Ranges) -> Handle:
        """Check a transfer of whole ranges, and take what it needs.

        Parameters
        ----------
        peer : str
        route : Route
        ranges : ndarray, uint64, shape (n, 3), n >= 1
            Source address here, target address there, bytes.

        Raises
        ------
        TransferRefusedError
            For an unknown peer, or if a range is not within one registered region of the route's
            memory on its side. An engine that checks the target only when it starts fails then.
        """

    @abstractmethod
    def start(self, handle: Handle) -> None:
        """Let the bytes move. Once per handle.

        After an exception the outcome is what `poll` says, PENDING for as long as it is unknown.
        """

    @abstractmethod
    def poll(self, handle: Handle) -> TransferState:
        """Where it stands; makes progress. An exception says nothing about it: ask again."""

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Ask that it end early. What came of it is what `poll` says; no-op if it is terminal.

        A handle that was prepared and not started becomes FAILED.
        """

    @abstractmethod
    def release(self, handle: Handle) -> None:
        """Give back what a terminal handle holds. `TransferRefusedError` if it is not terminal."""

    # --- messages ---

    @abstractmethod
    def send(self, peer: str, message: bytes) -> None:
        """Send a message.

        Raises
        ------
        PeerLostError
            If the peer is unknown or known to be gone.
        """

    @abstractmethod
    def receive(self) -> list[tuple[str, bytes]]:
        """Peer and bytes of each message that has come since the last call. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Handles that are not terminal stay with the engine, with their memory."""
