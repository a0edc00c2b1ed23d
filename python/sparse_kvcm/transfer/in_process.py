"""A transport within one process, for tests, demonstrations and machines without an engine.

All ends meet in a `Network`, which decides what becomes of each transfer: at once by default; tests
give it a policy that delays, reorders and fails. It keeps the rules of `transport`, and makes
what they permit likely: bytes move at the last moment, and a transfer that fails has moved some.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparse_kvcm.transfer.copier import Copier, Copy, HostCopier
from sparse_kvcm.transfer.transport import (
    SIZE,
    SOURCE,
    TARGET,
    Handle,
    PeerLostError,
    Ranges,
    Region,
    Registration,
    Route,
    TransferRefusedError,
    TransferState,
    Transport,
    all_within,
)


@dataclass
class Transfer:
    """A transfer in a network.

    Attributes
    ----------
    polls_left : int or None
        Polls after which it ends; None: when `Network.finish` is called.
    fails : bool
        How it ends then.
    start_error, poll_errors : Exception or None, int
        What `start` raises once it has begun; how many polls raise.
    """

    index: int
    source: str
    target: str
    route: Route
    ranges: Ranges
    polls_left: int | None = 0
    fails: bool = False
    start_error: Exception | None = None
    poll_errors: int = 0
    started: bool = False
    canceled: bool = False
    state: TransferState = TransferState.PENDING
    copy: Copy | None = None


Policy = Callable[[Transfer], None]  # may change what the attributes above say


@dataclass
class Network:
    """Where in-process transports meet.

    Attributes
    ----------
    policy : callable
        Called with each new transfer.
    copiers : mapping of Route to Copier, optional
        For routes that memmove cannot serve; `HostCopier` for all others.
    log : list of (str, int)
        "prepare", "start", "done", "failed", "release", and which transfer.
    """

    policy: Policy = lambda transfer: None
    copiers: Mapping[Route, Copier] = field(default_factory=dict)
    log: list[tuple[str, int]] = field(default_factory=list)
    ends: dict[str, InProcessTransport] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    num_transfers: int = 0

    def finish(self, index: int) -> None:
        """Let a transfer end at its next poll."""
        self.transfers[index].polls_left = 0

    def kill(self, name: str) -> None:
        """An end dies without a word: what goes to it fails, nothing reaches it."""
        del self.ends[name]


class InProcessTransport(Transport):
    """An end in a `Network`; see `Transport` for the calls.

    Parameters
    ----------
    network : Network
    name : str
        Not in the network yet.
    """

    kind = "in_process"

    def __init__(self, network: Network, name: str) -> None:
        if name in network.ends:
            raise TransferRefusedError(f"[InProcessTransport] name {name!r} must be a new one")
        self.name = name
        self.inbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self.regions: dict[int, tuple[Region, ...]] = {}
        self._network = network
        self._peers: set[str] = set()
        self._num_registrations = 0
        network.ends[name] = self

    def register(self, regions: Sequence[Region]) -> Registration:
        """See `Transport`."""
        self._num_registrations += 1
        self.regions[self._num_registrations] = tuple(regions)
        return self._num_registrations

    def deregister(self, registration: Registration) -> None:
        """See `Transport`."""
        if any(one.source == self.name for one in self._network.transfers.values()):
            raise TransferRefusedError("[deregister] all handles must be released before")
        del self.regions[registration]  # type: ignore[arg-type]

    def metadata(self) -> bytes:
        """See `Transport`."""
        return b"in-process:" + self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        """See `Transport`."""
        name = metadata.removeprefix(b"in-process:").decode(errors="replace")
        if metadata == b"in-process:" + name.encode() and name in self._network.ends:
            self._peers.add(name)
            return name
        raise TransferRefusedError(
            f"[add_peer] metadata must be of an end of the network, got {metadata[:40]!r}"
        )

    def remove_peer(self, peer: str) -> None:
        """See `Transport`."""
        self._peers.discard(peer)
        kept = [one for one in self.inbox if one[0] != peer]
        self.inbox.clear()
        self.inbox.extend(kept)

    def prepare(self, peer: str, route: Route, ranges: Ranges) -> Handle:
        """See `Transport`."""
        end = self._network.ends.get(peer)
        if peer not in self._peers or end is None:
            raise TransferRefusedError(f"[prepare] peer must be one that is there, got {peer!r}")
        self._check("source", self, route.source, route.source_device, ranges, SOURCE)
        self._check("target", end, route.target, route.target_device, ranges, TARGET)
        network = self._network
        index = network.num_transfers
        network.num_transfers += 1
        one = Transfer(index, self.name, peer, route, ranges.copy())
        network.policy(one)
        network.transfers[index] = one
        network.log.append(("prepare", index))
        return index

    def start(self, handle: Handle) -> None:
        """See `Transport`."""
        one = self._find(handle)
        one.started = True
        self._network.log.append(("start", one.index))
        if one.start_error is not None:
            raise one.start_error

    def poll(self, handle: Handle) -> TransferState:
        """See `Transport`."""
        one = self._find(handle)
        if one.state is not TransferState.PENDING or not one.started:
            return one.state
        if one.poll_errors > 0:
            one.poll_errors -= 1
            raise RuntimeError("[poll] the network does not know")
        if one.polls_left is None or one.polls_left > 0:
            one.polls_left = None if one.polls_left is None else one.polls_left - 1
            return one.state
        if one.copy is None:
            lost = one.target not in self._network.ends
            one.fails = one.fails or one.canceled or lost
            num_moving = 0 if lost else len(one.ranges) // (2 if one.fails else 1)
            moving = one.ranges[:num_moving]
            one.copy = self._copier(one.route).start(moving)
        if one.copy.query():
            self._end(one, TransferState.FAILED if one.fails else TransferState.DONE)
        return one.state

    def cancel(self, handle: Handle) -> None:
        """See `Transport`. What has started ends with its next polls, as the policy has it."""
        one = self._find(handle)
        one.canceled = True
        if not one.started and one.state is TransferState.PENDING:
            self._end(one, TransferState.FAILED)

    def release(self, handle: Handle) -> None:
        """See `Transport`."""
        one = self._find(handle)
        if one.state is TransferState.PENDING:
            raise TransferRefusedError(f"[release] transfer {one.index} must have ended before")
        del self._network.transfers[one.index]
        self._network.log.append(("release", one.index))

    def send(self, peer: str, message: bytes) -> None:
        """See `Transport`."""
        end = self._network.ends.get(peer)
        if peer not in self._peers or end is None:
            raise PeerLostError(f"[send] peer {peer!r} is not there")
        end.inbox.append((self.name, bytes(message)))

    def receive(self) -> list[tuple[str, bytes]]:
        """See `Transport`."""
        messages = []
        while self.inbox:
            messages.append(self.inbox.popleft())
        return messages

    def close(self) -> None:
        """See `Transport`."""
        self._network.ends.pop(self.name, None)

    # --- parts ---

    def _find(self, handle: Handle) -> Transfer:
        one = self._network.transfers.get(handle)  # type: ignore[call-overload]
        if not isinstance(one, Transfer) or one.source != self.name:
            raise TransferRefusedError(
                f"[InProcessTransport] handle {handle!r} must be one of ours"
            )
        return one

    def _end(self, one: Transfer, state: TransferState) -> None:
        one.state = state
        self._network.log.append((state.value, one.index))

    def _copier(self, route: Route) -> Copier:
        return self._network.copiers.get(route) or HostCopier()

    def _check(
        self,
        side: str,
        end: InProcessTransport,
        memory: str,
        device: int,
        ranges: Ranges,
        column: int,
    ) -> None:
        regions = [
            region
            for registered in end.regions.values()
            for region in registered
            if (region.memory, region.device) == (memory, device)
        ]
        if not all_within(ranges[:, column], ranges[:, SIZE], regions):
            raise TransferRefusedError(
                f"[prepare] every {side} range must lie within registered {memory} of {end.name}"
            )
