"""The bytes of a slice on their way, in groups: one per pair of memory types.

Groups are submitted together and end in any order. Until all have, everything that they read from
or write to belongs to the slice. One that fails, or is canceled, waits for the others. An exception
of the engine leaves a group in doubt, with its handle and its memory, until the engine says what
became of it; what it says then counts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparse_kvcm.transfer.bounce import Bounce, bounced, describe
from sparse_kvcm.transfer.copier import Copy
from sparse_kvcm.transfer.transport import (
    SIZE,
    Handle,
    Parts,
    Ranges,
    Route,
    TransferState,
    Transport,
    merged,
)
from sparse_kvcm.transfer.wire import BounceGrant, TransferGroup


class Stage(enum.Enum):
    """How far a group is. ENDED: no byte of it moves any more, and it holds nothing."""

    PREPARED = "prepared"
    GATHERING = "gathering"
    MOVING = "moving"
    ENDED = "ended"


@dataclass
class Group:
    """Pieces of one route. No call raises what an engine raised: it becomes a fault or a doubt.

    Attributes
    ----------
    pieces : Parts
        In the order of `Projection.pieces`.
    ranges : Ranges
        What the engine is given: merged, or gathered.
    fault : str
        Why it failed; empty unless it did.
    doubt : str
        What the engine raised last; empty if it has answered since.
    """

    transport: Transport
    route: Route
    pieces: Parts
    ranges: Ranges = field(init=False)
    stage: Stage = Stage.PREPARED
    fault: str = ""
    doubt: str = ""
    handle: Handle | None = None
    bounce: Bounce | None = None
    bounce_address: int | None = None
    bounce_dst_base: int | None = None
    gather: Copy | None = None

    def prepare(self, peer: str, bounce: Bounce | None, grant: BounceGrant | None) -> None:
        """Make a handle; a group that is gathered gets its room in the bounce region."""
        self.ranges = merged(self.pieces)
        if bounce and grant and bounce.suits(self.route, self.ranges, grant):
            self.bounce_address = bounce.take(int(self.ranges[:, SIZE].sum()))
            if self.bounce_address is not None:
                self.bounce, self.bounce_dst_base = bounce, grant.address
                self.ranges = bounced(self.ranges, self.bounce_address, grant)
        try:
            self.handle = self.transport.prepare(peer, self.route, self.ranges)
        except Exception as error:  # `prepare` moves nothing, whatever it raises
            self.fault = f"cannot be submitted: {_say(error)}"
            self._end()

    def start(self) -> None:
        """Let its bytes move; of a group that is gathered, once they lie side by side."""
        if self.bounce is None or self.bounce_address is None:
            self._start()
            return
        try:
            self.gather = self.bounce.gather(self.pieces, self.bounce_address)
            self.stage = Stage.GATHERING
        except Exception as error:  # nothing moves after it
            self.fault = f"cannot be gathered: {_say(error)}"
            self.cancel()

    def progress(self, stops: str) -> None:
        """Look how far it is. With `stops`, a reason, it goes no further than it must."""
        if self.stage is Stage.ENDED:
            return
        if self.stage is Stage.GATHERING and not self._gathered():
            return
        if self.stage is not Stage.MOVING:
            if not stops:
                self._start()
                return
            self.fault = self.fault or stops
            self.cancel()
        self._look()

    def cancel(self) -> None:
        """Ask it to end."""
        if self.handle is None or self.stage is Stage.GATHERING:
            return
        try:
            self.transport.cancel(self.handle)
        except Exception as error:
            self.doubt = f"cancel: {_say(error)}"

    def describe(self) -> TransferGroup:
        """What was sent."""
        return describe(self.route, self.ranges, self.bounce_dst_base)

    def _start(self) -> None:
        assert self.handle is not None  # by prepare
        self.stage = Stage.MOVING
        try:
            self.transport.start(self.handle)
        except Exception as error:
            self.doubt = f"start: {_say(error)}"

    def _gathered(self) -> bool:
        assert self.gather is not None  # by start
        try:
            done = self.gather.query()
        except Exception as error:
            self.doubt = f"gather: {_say(error)}"
            return False
        if done:
            self.gather, self.doubt, self.stage = None, "", Stage.PREPARED
        return done

    def _look(self) -> None:
        assert self.handle is not None  # until it ends
        try:
            state = self.transport.poll(self.handle)
            self.doubt = ""
            if state is TransferState.FAILED:
                self.fault = self.fault or "the transfer failed"
            if state is not TransferState.PENDING:
                self.transport.release(self.handle)
                self.handle = None
                self._end()
        except Exception as error:
            self.doubt = f"poll: {_say(error)}"

    def _end(self) -> None:
        if self.bounce is not None and self.bounce_address is not None:
            self.bounce.give_back(self.bounce_address)
        self.bounce, self.bounce_address = None, None
        self.stage = Stage.ENDED


class Moving:
    """The groups of one slice.

    Parameters
    ----------
    transport : Transport
    peer : str
    pieces : mapping of Route to Parts
        See `Projection.pieces`.
    bounce, grant : optional
        Where groups may be gathered, here and there.
    since : float
        Now, in the sender's seconds.

    Attributes
    ----------
    fault : str
        What failed first, or nothing.
    """

    def __init__(
        self,
        transport: Transport,
        peer: str,
        pieces: Mapping[Route, Parts],
        bounce: Bounce | None,
        grant: BounceGrant | None,
        since: float,
    ) -> None:
        self.since = since
        self.fault = ""
        self.groups = [Group(transport, route, one) for route, one in pieces.items()]
        self._stops = ""
        for group in self.groups:
            group.prepare(peer, bounce, grant)
            if group.bounce_address is not None:
                grant = None  # its room is one group's
        self._note()
        if self.fault:  # nothing has moved yet
            self.cancel(self.fault)
            return
        for group in self.groups:
            group.start()
        self._note()

    @property
    def ended(self) -> bool:
        """Whether no byte moves any more."""
        return all(one.stage is Stage.ENDED for one in self.groups)

    @property
    def canceled(self) -> bool:
        """Whether it was."""
        return bool(self._stops)

    @property
    def doubt(self) -> str:
        """What the engine raised and has not explained, or nothing."""
        return next((one.doubt for one in self.groups if one.doubt), "")

    @property
    def num_handles(self) -> int:
        """Handles that are not released."""
        return sum(one.handle is not None for one in self.groups)

    def progress(self) -> None:
        """Look at every group that has not ended."""
        stops = self._stops or self.fault
        for group in self.groups:
            group.progress(stops)
        self._note()

    def cancel(self, reason: str) -> None:
        """Ask all groups to end; they end when the engine says so."""
        self._stops = self._stops or reason
        for group in self.groups:
            if group.stage is not Stage.ENDED:
                group.cancel()
        self.progress()

    def describe(self) -> tuple[TransferGroup, ...]:
        """What was sent."""
        return tuple(one.describe() for one in self.groups)

    def _note(self) -> None:
        self.fault = self.fault or next((one.fault for one in self.groups if one.fault), "")


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
