"""The book of a sender: offers, what receivers ask for, and how the two meet and end.

Every RequestData that is not a repetition gets one result, on each path: done, failed, expired, or
its peer is gone. An offer ends when none of its slices is without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.offers import Offer, Outcome, Peer, Slice
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.ranks import RankInfo, sends_to
from sparse_kvcm.transfer.slices import Moving
from sparse_kvcm.transfer.transport import PeerLostError, Transport
from sparse_kvcm.transfer.wire import (
    MAX_REASON,
    Cancel,
    RequestData,
    SliceResult,
    TransferGroup,
    encode_message,
)

K = TypeVar("K")
V = TypeVar("V")

UNCLAIMED_SECONDS = 120.0
STALL_SECONDS = 120.0
MAX_OPEN_SLICES = 4096  # of one peer
MAX_OPEN_BYTES = 256 << 20  # of one peer, in page lists
MAX_ENDED = 65536  # requests and refusals that are remembered


class Ledger:
    """See the module. Parameters as of `Sender`.

    Attributes
    ----------
    peers : dict of str to Peer
    offers : dict of str to Offer
    unclaimed : dict of str to list of Slice
        By request: what came before its offer.
    ended : dict of str to (float, Offer)
        Since when; a request that was canceled before it was offered is one, too.
    """

    def __init__(
        self,
        transport: Transport,
        rank: RankInfo,
        bounce: Bounce | None,
        clock: Callable[[], float],
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.offers: dict[str, Offer] = {}
        self.unclaimed: dict[str, list[Slice]] = {}
        self.ended: dict[str, tuple[float, Offer]] = {}
        self._refused: dict[tuple[str, str, int], tuple[float, set[int]]] = {}
        self._transport = transport
        self._rank = rank
        self._bounce = bounce
        self._clock = clock

    def is_known(self, request_id: str) -> bool:
        """Whether it is an offered request, or was one until lately."""
        ended = self.ended.get(request_id)
        return request_id in self.offers or (ended is not None and not ended[1].is_early)

    def take_offer(self, request_id: str, offer: Offer) -> None:
        """Enter an offer; what has been asked of it meets it, or ends it if it was canceled."""
        early = self.ended.pop(request_id, None)
        if early is not None and offer.peer in (None, early[1].peer):
            offer.failure, offer.answered = early[1].failure, early[1].answered
            offer.claim = early[1].claim
        self.offers[request_id] = offer
        for one in self.unclaimed.pop(request_id, []):
            self._claim(offer, one)

    def fail(self, offer: Offer, reason: str) -> None:
        """Give an offer up: no more of it starts, what moves goes on."""
        offer.failure = offer.failure or reason
        for one in [one for one in offer.slices.values() if one.moving is None]:
            self._answer(offer, one, offer.failure)

    def abort(self, offer: Offer, reason: str) -> None:
        """Give an offer up, and ask what moves to end."""
        self.fail(offer, reason)
        for one in offer.slices.values():
            if one.moving is not None:
                one.moving.cancel(offer.failure)

    def drop_peer(self, peer: str) -> None:
        """Give up all that is for a peer; it gets no more messages."""
        self.peers[peer].leaving = True
        for request_id in list(self.unclaimed):
            self._answer_unclaimed(request_id, lambda one: one.peer == peer, "the peer is gone")
        for offer in self.offers.values():
            if offer.claim is not None and offer.claim[0] == peer:
                self.abort(offer, f"peer {peer} is gone")

    def take_request(self, peer: str, data: RequestData) -> None:
        """A receiver asks for a slice."""
        one = Slice(peer, data, self._clock())
        offer = self.offers.get(data.request_id)
        waiting = self.unclaimed.get(data.request_id, [])
        known = [offer] if offer else []
        known += [self.ended[data.request_id][1]] if data.request_id in self.ended else []
        _, refused = self._refused.get((data.request_id, *one.claim), (0.0, set[int]()))
        if (
            data.slice_id in refused
            or any(two.has_seen(one) for two in known)
            or any(two.is_same(one) for two in waiting)
        ):
            return
        self.peers[peer].num_open += 1
        self.peers[peer].open_bytes += one.num_bytes
        refusal = self._refusal(one)
        if refusal:
            self._answer(None, one, refusal)
        elif offer is not None:
            self._claim(offer, one)
        else:
            self.unclaimed.setdefault(data.request_id, []).append(one)

    def take_cancel(self, peer: str, data: Cancel) -> None:
        """A receiver wants no more; of what has ended, or never was, it says nothing."""
        reason = f"canceled by {peer}: {data.reason}"
        offer = self.offers.get(data.request_id)
        if offer is not None and offer.claim == (peer, data.attempt):
            self.abort(offer, reason)
        elif offer is None:
            found = self._answer_unclaimed(
                data.request_id, lambda one: one.claim == (peer, data.attempt), reason
            )
            if found and data.request_id not in self.unclaimed:
                ended = Offer(found[0].data.prompt_tokens, self._clock(), peer, failure=reason)
                ended.claim, ended.is_early = found[0].claim, True
                ended.answered = {one.data.slice_id for one in found}
                self._remember(data.request_id, ended)

    def progress(self) -> list[Outcome]:
        """Submit, look, answer, expire. Requests that have ended."""
        now = self._clock()
        for offer in self.offers.values():
            self._progress(offer, now)
            if offer.is_idle and now - offer.touched >= UNCLAIMED_SECONDS:
                self.fail(offer, f"not asked for within {UNCLAIMED_SECONDS:.0f} s")
        for request_id in list(self.unclaimed):
            self._answer_unclaimed(
                request_id,
                lambda one: now - one.since >= UNCLAIMED_SECONDS,
                f"not offered within {UNCLAIMED_SECONDS:.0f} s",
            )
        _forget(self.ended, now)
        _forget(self._refused, now)
        over = [request_id for request_id, offer in self.offers.items() if offer.is_over]
        return [self._end(request_id) for request_id in over]

    # --- parts ---

    def _refusal(self, one: Slice) -> str:
        """Why a new RequestData cannot be served at all, or nothing."""
        peer = self.peers[one.peer]
        if not sends_to(self._rank, peer.rank):
            return (
                f"rank {self._rank.rank} of {self._rank.num_ranks} does not send to rank "
                f"{peer.rank.rank} of {peer.rank.num_ranks}"
            )
        if peer.num_open > MAX_OPEN_SLICES:
            return f"more than {MAX_OPEN_SLICES} slices of {one.peer} have no result yet"
        if peer.open_bytes > MAX_OPEN_BYTES:
            return f"more than {MAX_OPEN_BYTES} bytes of page lists of {one.peer} wait for a result"
        if one.data.request_id in self.ended:
            failure = self.ended[one.data.request_id][1].failure
            return f"the request has ended: {failure or 'it was sent'}"
        return ""

    def _claim(self, offer: Offer, one: Slice) -> None:
        if offer.claim != one.claim:
            misfit = self._misfit(offer, one)
            if misfit:
                self._answer(None, one, misfit)
                return
            offer.claim, offer.num_slices = one.claim, one.data.num_slices
        offer.slices[one.data.slice_id] = one
        objection = offer.failure or offer.objection(one)
        if objection:
            self.fail(offer, objection)

    def _misfit(self, offer: Offer, one: Slice) -> str:
        """Why a RequestData does not get an offer, which stays as it is; or nothing."""
        data = one.data
        if offer.peer not in (None, one.peer):
            return "the request is for another peer"
        if offer.claim is not None:
            return "the request is being sent to another peer or attempt"
        if (data.request_id, *one.claim) in self._refused:
            return "another slice of this attempt was refused"
        if data.prompt_tokens != offer.prompt_tokens:
            return f"prompt_tokens must be {offer.prompt_tokens}, got {data.prompt_tokens}"
        tokens = (data.token_begin, data.token_end)
        try:
            self.peers[one.peer].projection.places(data.pages, tokens, data.prompt_tokens)
        except PeerDataError as error:
            return str(error)
        return ""

    def _progress(self, offer: Offer, now: float) -> None:
        try:
            offer.take_marks()
        except Exception as error:
            self.abort(offer, f"pages are not written: {error}")
        if offer.failure:
            self.fail(offer, offer.failure)
        for one in list(offer.slices.values()):
            if one.moving is None and one.data.token_end <= offer.computed and not offer.failure:
                self._submit(offer, one, now)
            if one.moving is not None:
                self._look(offer, one, one.moving, now)

    def _submit(self, offer: Offer, one: Slice, now: float) -> None:
        data = one.data
        projection = self.peers[one.peer].projection
        try:
            pieces = projection.pieces(
                offer.pages, data.pages, (data.token_begin, data.token_end), data.prompt_tokens
            )
        except PeerDataError as error:
            self.fail(offer, str(error))
            return
        one.moving = Moving(self._transport, one.peer, pieces, self._bounce, data.bounce, now)

    def _look(self, offer: Offer, one: Slice, moving: Moving, now: float) -> None:
        moving.progress()
        if moving.fault:
            self.fail(offer, moving.fault)
        if not moving.ended and now - moving.since >= STALL_SECONDS and not moving.canceled:
            self.abort(offer, f"no end within {STALL_SECONDS:.0f} s")
        if moving.ended:
            offer.touched = now
            self._answer(offer, one, offer.failure, moving.describe())

    def _answer(
        self,
        offer: Offer | None,
        one: Slice,
        failure: str,
        groups: tuple[TransferGroup, ...] = (),
    ) -> None:
        """Settle a slice: its result goes out, and it is no longer open."""
        data = one.data
        if offer is not None:
            del offer.slices[data.slice_id]
            offer.answered.add(data.slice_id)
        else:
            key = (data.request_id, *one.claim)
            _, refused = self._refused.pop(key, (0.0, set[int]()))
            refused.add(data.slice_id)
            self._refused[key] = (self._clock(), refused)
        peer = self.peers[one.peer]
        peer.num_open -= 1
        peer.open_bytes -= one.num_bytes
        result = SliceResult(
            data.request_id,
            data.attempt,
            data.slice_id,
            "failed" if failure else "done",
            self._rank.rank,
            failure[:MAX_REASON],
            () if failure else groups,
        )
        if peer.leaving:
            return
        try:
            self._transport.send(one.peer, encode_message(result))
        except PeerLostError as error:
            if offer is not None:  # its other slices are answered by its next progress
                offer.failure = offer.failure or str(error)

    def _answer_unclaimed(
        self, request_id: str, which: Callable[[Slice], bool], reason: str
    ) -> list[Slice]:
        waiting = self.unclaimed.pop(request_id, [])
        found = [one for one in waiting if which(one)]
        kept = [one for one in waiting if not which(one)]
        if kept:
            self.unclaimed[request_id] = kept
        for one in found:
            self._answer(None, one, reason)
        return found

    def _end(self, request_id: str) -> Outcome:
        offer = self.offers.pop(request_id)
        offer.pages.clear()
        self._remember(request_id, offer)
        return Outcome(request_id, "failed" if offer.failure else "done", offer.failure)

    def _remember(self, request_id: str, offer: Offer) -> None:
        self.ended.pop(request_id, None)
        self.ended[request_id] = (self._clock(), offer)


def _forget(entries: dict[K, tuple[float, V]], now: float) -> None:
    """Drop what is old, or too much, oldest first."""
    while entries:
        key, (since, _) = next(iter(entries.items()))
        if now - since < UNCLAIMED_SECONDS and len(entries) <= MAX_ENDED:
            break
        del entries[key]
