"""The receiving side of an offloading worker: admits requests, asks for their pages, repacks.

An engine calls `poll` between its steps; nothing here waits. A request is admitted when its host
pages, its lease, its pages on the GPU and some staging can all be had. Then its slices are
asked for, those of the history as staging has room, and what has arrived is repacked by threads
while the next slices are on their way. When all of it is there, the request is the engine's.

Pages that a peer was told of belong to it until it has said what became of them. So a request that
fails is reported at once, but what it holds comes back when every slice has a result, or the
peer is gone. A peer that is silent is taken for gone in the end: see `ReceiverOptions.silence_s`.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.arrivals import Arrivals
from sparse_kvcm.transfer.attempts import (
    Attempt,
    Received,
    ReceiverOptions,
    ReceiverUse,
    SliceStage,
    Stage,
    plan_slices,
    posted_pages,
    use_of,
)
from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.peers import Peers
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.target import NoRoomError, OffloadTarget
from sparse_kvcm.transfer.transport import PeerLostError, Registration, Transport
from sparse_kvcm.transfer.wire import (
    MAX_REASON,
    Cancel,
    Pong,
    RequestData,
    SliceResult,
    check_request_id,
    decode_message,
    encode_message,
    make_card,
)


class Receiver:
    """Brings requests from peers into a manager. One thread at a time.

    Parameters
    ----------
    transport : Transport
        For this receiver alone.
    target : OffloadTarget
    rank : RankInfo
    options : ReceiverOptions, optional
    bounce : Bounce, optional
        Where small pages of the GPU arrive side by side.
    clock : callable
        Seconds.

    Attributes
    ----------
    num_strays : int
        Messages that were dropped: malformed, late, twice, or of nobody's.
    num_bytes : dict of (str, str) to int
        What peers say that they sent, by memory type here and there.
    """

    def __init__(
        self,
        transport: Transport,
        target: OffloadTarget,
        rank: RankInfo | None = None,
        options: ReceiverOptions | None = None,
        bounce: Bounce | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._target = target
        self._rank = rank or RankInfo()
        self._options = options or ReceiverOptions()
        self._clock = clock
        self._arrivals = Arrivals(target, bounce, self._options.num_workers)
        self._registration: Registration | None = transport.register(self._arrivals.regions)
        self._numbers = itertools.count(1)
        self._peers = Peers(transport, target.table, self._options.silence_s, clock)
        self._attempts: dict[int, Attempt] = {}  # by number, in the order in which they came
        self._by_id: dict[str, Attempt] = {}  # that have not failed
        self._results: list[Received] = []
        self.num_strays = 0
        self.num_bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def card(self) -> bytes:
        """What a peer needs to know."""
        transport = self._transport
        return make_card(
            transport.name, transport.kind, self._rank, transport.metadata(), self._target.table
        )

    def add_peer(self, card: bytes) -> str:
        """Learn of a peer from its card; its name.

        Raises
        ------
        PeerDataError
            If the card is malformed, of another engine or name, or of one that lacks buffers.
        """
        return self._peers.add(card)

    def remove_peer(self, peer: str, reason: str = "it was removed") -> None:
        """A peer is gone for good: no byte of it moves any more. Its requests fail.

        Only whoever calls can know: a removed NIXL peer that lives may go on writing.
        """
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        for attempt in [one for one in self._attempts.values() if one.peer == peer]:
            for one in list(attempt.in_stage(SliceStage.POSTED)):
                self._arrivals.end(one)
            self._fail(attempt, f"peer {peer} is gone: {reason}")

    # --- requests ---

    def request(
        self, peer: str, request_id: str, key: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        """Ask a peer for a request.

        Parameters
        ----------
        peer : str
        request_id : str
            The peer's name of it.
        key : int
            What the manager is to call it.
        prompt_tokens, max_tokens : int
            That it has, and may ever have.

        Raises
        ------
        InvalidArgument
            For an id in use or that is none, an unknown peer, or a request that would never fit.
        NoRoomError
            If there is no room, and none to wait: names the limit.
        """
        if peer not in self._peers:
            raise InvalidArgument(f"[request] peer must be one that was added, got {peer!r}")
        check_request_id("request", request_id)
        if request_id in self._by_id:
            raise InvalidArgument(f"[request] request_id {request_id!r} must be a new one")
        if any(one.key == key for one in self._attempts.values()):
            raise InvalidArgument(f"[request] key must be one that is not in use, got {key}")
        attempt = Attempt(
            next(self._numbers), request_id, key, peer, prompt_tokens, max_tokens, self._clock()
        )
        queued = [one for one in self._attempts.values() if one.stage is Stage.QUEUED]
        try:
            if queued:
                raise NoRoomError(queued[0].lacks, "[request] others wait for room")
            self._admit(attempt)
        except NoRoomError as error:
            if len(queued) >= self._options.max_queued:
                raise
            attempt.lacks = error.limit
        self._attempts[attempt.number] = self._by_id[request_id] = attempt

    def cancel(self, request_id: str, reason: str = "it was canceled") -> bool:
        """Give a request up; `poll` reports it. False if it is not on its way (any more)."""
        attempt = self._by_id.get(request_id)
        if attempt is None:
            return False
        self._fail(attempt, reason)
        return True

    def poll(self) -> list[Received]:
        """Go on as far as possible; requests that are through since the last call."""
        for peer, data in self._transport.receive():
            self._peers.hear(peer)
            self._take(peer, data)
        for attempt in list(self._attempts.values()):
            self._look_at(attempt)
        self._admit_queued()
        self._post()
        self._watch()
        results, self._results = self._results, []
        return results

    @property
    def use(self) -> ReceiverUse:
        """What is in use."""
        staging = self._target.staging
        staged = len(staging.slots) - staging.num_free
        return use_of(self._attempts.values(), staged, self._arrivals.bounce_bytes)

    @property
    def waiting(self) -> dict[str, str]:
        """The limit that binds, by request that waits for room."""
        return {one.request_id: one.lacks for one in self._by_id.values() if one.lacks}

    def close(self, timeout_s: float = 5.0) -> None:
        """Give all requests up, wait so long for their peers, and leave. No-op if closed.

        Memory is deregistered before pages of peers that did not answer go back: an engine lets
        nobody begin a write to it then. What is under way is the engine's to end.
        """
        if self._registration is None:
            return
        for request_id in list(self._by_id):
            self.cancel(request_id, "the receiver closes")
        end = time.monotonic() + timeout_s
        while self._attempts and time.monotonic() < end:
            self.poll()
            time.sleep(0.001)
        self._transport.deregister(self._registration)
        self._registration = None
        for peer in self._peers:
            self.remove_peer(peer, "the receiver closes")
        self._arrivals.close()
        self.poll()
        while self.use.scattering:  # copies on a GPU, which end
            self.poll()

    def _take(self, peer: str, data: bytes) -> None:
        try:
            message = decode_message(data)
        except PeerDataError:
            message = None
        if isinstance(message, Pong):
            return
        attempt = self._attempts.get(message.attempt) if isinstance(message, SliceResult) else None
        if (
            not isinstance(message, SliceResult)
            or attempt is None
            or (attempt.peer, attempt.request_id) != (peer, message.request_id)
            or message.slice_id >= len(attempt.slices)
            or attempt.slices[message.slice_id].stage is not SliceStage.POSTED
        ):
            self.num_strays += 1
            return
        one = attempt.slices[message.slice_id]
        if attempt.stage is Stage.ADMITTED:
            attempt.since = self._clock()
        for group in message.transfer_groups:
            self.num_bytes[group.source, group.target] += group.num_bytes
        if message.status == "failed":
            self._arrivals.end(one)
            self._fail(attempt, f"peer {peer} failed: {message.reason}")
        elif fault := self._arrivals.take(attempt, one, message.transfer_groups):
            self._fail(attempt, fault)

    def _send(self, attempt: Attempt, message: RequestData | Cancel) -> bool:
        try:
            self._transport.send(attempt.peer, encode_message(message))
        except PeerLostError as error:
            self.remove_peer(attempt.peer, str(error))
            return False
        return True

    def _admit(self, attempt: Attempt) -> None:
        """Take what it needs, or NoRoomError."""
        options, target = self._options, self._target
        admitted = sum(one.stage is not Stage.QUEUED for one in self._attempts.values())
        if admitted >= options.max_in_flight:
            raise NoRoomError("transfers in flight", f"[request] {admitted} are on their way")
        pages = target.num_pages(attempt.prompt_tokens)
        slice_pages = min(options.slice_pages, target.staging.largest_slice(len(self._peers)))
        least, free = min(pages, slice_pages), target.staging.num_free
        if least > free:
            raise NoRoomError("staging", f"[request] {least} slots are needed, {free} free")
        target.admit(attempt.key, attempt.prompt_tokens, attempt.max_tokens)
        attempt.slices = plan_slices(attempt.prompt_tokens, target.page_tokens, pages, slice_pages)
        attempt.stage, attempt.since, attempt.lacks = Stage.ADMITTED, self._clock(), ""

    def _admit_queued(self) -> None:
        """First come, first served: who needs much is not passed by until it starves."""
        for attempt in [one for one in self._attempts.values() if one.stage is Stage.QUEUED]:
            try:
                self._admit(attempt)
            except NoRoomError as error:
                attempt.lacks = error.limit
                return
            except Exception as error:  # also the device's: this request's alone
                self._fail(attempt, str(error))

    def _post(self) -> None:
        """Ask for slices of all admitted requests in turn, as long as there is staging."""
        waiting = [one for one in list(self._attempts.values()) if self._is_ready(one)]
        held = posted_pages(self._attempts.values())
        while waiting:
            waiting = [one for one in waiting if self._post_next(one, held)]

    def _is_ready(self, attempt: Attempt) -> bool:
        try:
            return attempt.stage is Stage.ADMITTED and self._target.is_ready(attempt.key)
        except Exception as error:  # the device's, whatever it is: this request's alone
            self._fail(attempt, f"its pages do not become ready: {error}")
            return False

    def _post_next(self, attempt: Attempt, held: collections.Counter[str]) -> bool:
        """Whether a slice was asked for."""
        staging, one = self._target.staging, next(attempt.in_stage(SliceStage.PLANNED), None)
        if one is None or attempt.stage is not Stage.ADMITTED:
            return False
        if one.num_pages:
            if not staging.may_take(one.num_pages, held[attempt.peer], len(self._peers)):
                return False
            held[attempt.peer] += one.num_pages
            one.slots = staging.take(one.num_pages)
            pages = [self._target.staged_pages(one.first_page, one.slots)]
        else:
            pages = self._target.device_pages(attempt.key)
        one.stage, one.since = SliceStage.POSTED, self._clock()
        projection = self._peers.projection(attempt.peer)
        self._arrivals.expect(attempt, one, pages, projection)
        message = RequestData(
            request_id=attempt.request_id,
            attempt=attempt.number,
            slice_id=one.index,
            num_slices=len(attempt.slices),
            token_begin=one.tokens[0],
            token_end=one.tokens[1],
            prompt_tokens=attempt.prompt_tokens,
            pages=tuple(pages),
            bounce=one.landing.grant if one.landing else None,
        )
        return self._send(attempt, message)

    def _look_at(self, attempt: Attempt) -> None:
        num_ended, fault = self._arrivals.progress(attempt)
        if num_ended:
            attempt.since = self._clock()
        if fault:
            self._fail(attempt, fault)
        self._expire(attempt)
        if attempt.stage is Stage.DRAINING:
            self._settle(attempt)
        elif attempt.stage is Stage.ADMITTED and attempt.is_complete:
            self._complete(attempt)

    def _expire(self, attempt: Attempt) -> None:
        why = attempt.overdue(self._clock(), self._options.expiry_s)
        if why and attempt.stage is Stage.DRAINING:
            self.remove_peer(attempt.peer, why)
        elif why:
            self._fail(attempt, why)

    def _watch(self) -> None:
        """Who is silent while slices wait for it loses its requests, and then is taken for gone."""
        all_of = list(self._attempts.values())
        awaited = {one.peer for one in all_of if any(one.in_stage(SliceStage.POSTED))}
        for peer, is_gone in self._peers.watch(awaited):
            reason = f"no answer to a Ping within {self._options.silence_s:g} s"
            if is_gone:
                self.remove_peer(peer, reason)
            for attempt in all_of:
                if attempt.peer == peer and attempt.stage is Stage.ADMITTED:
                    self._fail(attempt, f"peer {peer} is silent: {reason}")

    def _complete(self, attempt: Attempt) -> None:
        try:
            self._target.commit(attempt.key)
        except Exception as error:  # the device's, whatever it is: this request's alone
            self._fail(attempt, f"commit failed: {error}")
            return
        del self._attempts[attempt.number], self._by_id[attempt.request_id]
        self._results.append(Received(attempt.request_id, attempt.key))

    def _fail(self, attempt: Attempt, reason: str) -> None:
        """Report it, and ask its peer to stop. Its pages go back when nobody writes to them."""
        if not attempt.reason:
            attempt.reason = reason[:MAX_REASON]
            was_queued = attempt.stage is Stage.QUEUED
            attempt.stage, attempt.since, attempt.lacks = Stage.DRAINING, self._clock(), ""
            del self._by_id[attempt.request_id]
            self._results.append(Received(attempt.request_id, attempt.key, attempt.reason))
            if was_queued:
                del self._attempts[attempt.number]
                return
            if any(attempt.in_stage(SliceStage.POSTED)) and not self._send(
                attempt, Cancel(attempt.request_id, attempt.number, attempt.reason)
            ):
                return  # its peer is gone, and with it this
        self._settle(attempt)

    def _settle(self, attempt: Attempt) -> None:
        if attempt.is_settled and attempt.number in self._attempts:
            del self._attempts[attempt.number]
            self._target.drop(attempt.key)
