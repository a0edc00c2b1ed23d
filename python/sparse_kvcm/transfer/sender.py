"""The sending side: offers pages of requests, and writes them where receivers ask for them.

    offer     a request is computed, or will be; its pages belong to the transfer now
    claim     a receiver's RequestData meets the offer, whichever of the two comes first
    slice     each RequestData is answered once its tokens are computed (`advance`)
    outcome   all slices are done, or one failed and the others have ended: the pages go back

Who waits for the other side is given up after UNCLAIMED_SECONDS: a RequestData without an offer, an
offer that nobody asks for. Bytes on their way are given up by the engine alone: what stalls is
canceled and reported, and keeps its pages until the engine has spoken.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument, InvalidState
from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.copier import Done
from sparse_kvcm.transfer.ledger import UNCLAIMED_SECONDS, Ledger
from sparse_kvcm.transfer.offers import Offer, Outcome, Peer, Ready, check_tokens
from sparse_kvcm.transfer.page_table import PageTable, PeerDataError, check_table
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.ranks import RankInfo, check_rank
from sparse_kvcm.transfer.transport import PeerLostError, Registration, Transport
from sparse_kvcm.transfer.wire import (
    Cancel,
    PageList,
    Ping,
    Pong,
    RequestData,
    check_request_id,
    decode_card,
    decode_message,
    encode_message,
    make_card,
)

__all__ = ["UNCLAIMED_SECONDS", "Outcome", "Ready", "Sender", "SenderUse"]


@dataclass(frozen=True)
class SenderUse:
    """What a sender holds.

    Attributes
    ----------
    num_peers : int
        Receivers that it has met, those included that are gone and still have transfers.
    num_offers : int
        Requests whose pages belong to it.
    num_unclaimed : int
        RequestData without an offer.
    num_handles : int
        Of the engine.
    bounce_bytes : int
        Of the bounce region.
    num_dropped : int
        Messages since the beginning that were malformed, or of nobody we know.
    """

    num_peers: int
    num_offers: int
    num_unclaimed: int
    num_handles: int
    bounce_bytes: int
    num_dropped: int


class Sender:
    """Sends pages of one page table. One thread at a time.

    Parameters
    ----------
    transport : Transport
        Its own; memory of the table is registered with it.
    table : PageTable
        What requests' pages are of.
    rank : RankInfo, optional
        Among the ranks of this side.
    bounce : Bounce, optional
        Where small pages are gathered.
    clock : callable
        Seconds.

    Raises
    ------
    InvalidArgument
        If the table does not hold together, or its memory cannot be registered.
    """

    def __init__(
        self,
        transport: Transport,
        table: PageTable,
        *,
        rank: RankInfo | None = None,
        bounce: Bounce | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_table(table)
        self.rank = rank or RankInfo()
        check_rank(self.rank)
        self._transport = transport
        self._table = table
        self._bounce = bounce
        self._clock = clock
        self._ledger = Ledger(transport, self.rank, bounce, clock)
        self._num_dropped = 0
        regions = table.regions() + ([bounce.region] if bounce else [])
        self._registration: Registration | None = transport.register(regions)

    # --- peers ---

    def card(self) -> bytes:
        """What a receiver needs to meet this sender."""
        return make_card(
            self._transport.name,
            self._transport.kind,
            self.rank,
            self._transport.metadata(),
            self._table,
        )

    def add_peer(self, card: bytes) -> str:
        """Meet a receiver, by its card; its name.

        An engine believes what metadata says of whose it is, so cards must come from whom they
        seem to.

        Raises
        ------
        PeerDataError
            If the card is malformed, of another engine, or asks for buffers that are not here.
        """
        read = decode_card(card)
        if read.transport != self._transport.kind:
            raise PeerDataError(
                f"[add_peer] transport must be {self._transport.kind}, got {read.transport}"
            )
        if read.name in self._ledger.peers:
            raise InvalidArgument(f"[add_peer] peer {read.name!r} must be a new one")
        projection = Projection(self._table, read.page_table())
        name = self._transport.add_peer(read.metadata)
        if name != read.name:
            if name not in self._ledger.peers:
                self._transport.remove_peer(name)
            raise PeerDataError(f"[add_peer] metadata must be of {read.name!r}, got {name!r}")
        self._ledger.peers[name] = Peer(read.rank, projection)
        return name

    def remove_peer(self, peer: str) -> None:
        """A receiver is gone, or unwanted: its requests fail, and it is forgotten as they end."""
        if peer in self._ledger.peers:
            self._ledger.drop_peer(peer)

    # --- requests ---

    def offer(
        self,
        request_id: str,
        prompt_tokens: int,
        pages: Iterable[PageList] = (),
        *,
        computed: int | None = None,
        ready: Ready | None = None,
        peer: str | None = None,
    ) -> None:
        """Give a request's pages to the transfer, until `progress` returns its outcome.

        Parameters
        ----------
        request_id : str
            Of no other request here or that ended within UNCLAIMED_SECONDS.
        prompt_tokens : int
            Tokens that it will have.
        pages : iterable of PageList
            By layer group of the table; those of windows may come later, with `advance`.
        computed : int, optional
            Tokens that these pages have; all by default.
        ready : Ready, optional
            When they are written; now, by default.
        peer : str, optional
            The receiver that it is for. By default it is whose RequestData comes first and fits,
            so all receivers must be trusted not to ask for what is another's.

        Raises
        ------
        InvalidArgument
            Nothing has changed then.
        """
        check_tokens(prompt_tokens)
        check_request_id("offer", request_id)
        if self._ledger.is_known(request_id):
            raise InvalidArgument(f"[offer] request_id {request_id!r} must be a new one")
        if peer is not None and peer not in self._ledger.peers:
            raise InvalidArgument(f"[offer] peer must be one that was added, got {peer!r}")
        offer = Offer(prompt_tokens, self._clock(), peer)
        self._extend(offer, pages, prompt_tokens if computed is None else computed, ready)
        self._ledger.take_offer(request_id, offer)

    def advance(
        self,
        request_id: str,
        computed: int,
        pages: Iterable[PageList] = (),
        *,
        ready: Ready | None = None,
    ) -> None:
        """More of a request is computed; `pages` replace lists, and keep what was in them.

        Raises
        ------
        InvalidArgument
            Nothing has changed then.
        """
        offer = self._ledger.offers.get(request_id)
        if offer is None:
            raise InvalidArgument(f"[advance] request_id must be offered, got {request_id!r}")
        self._extend(offer, pages, computed, ready)

    def abort(self, request_id: str, reason: str) -> None:
        """Give a request up, whatever is under way; no-op if it has ended or was never offered.

        Its outcome comes, and its pages with it, when nothing of it moves any more.
        """
        offer = self._ledger.offers.get(request_id)
        if offer is not None:
            self._ledger.abort(offer, reason)

    # --- progress ---

    def progress(self) -> list[Outcome]:
        """Read messages, submit, look, answer; never waits. Requests that have ended."""
        for peer, message in self._transport.receive():
            self._receive(peer, message)
        outcomes = self._ledger.progress()
        peers = self._ledger.peers
        for name in [name for name, one in peers.items() if one.leaving and not one.num_open]:
            del peers[name]
            self._transport.remove_peer(name)
        return outcomes

    def in_doubt(self) -> dict[str, str]:
        """Requests that have failed, or may have, and still move bytes: why, by request."""
        found = {}
        for request_id, offer in self._ledger.offers.items():
            doubts = [one.moving.doubt for one in offer.slices.values() if one.moving]
            reason = offer.failure or next((doubt for doubt in doubts if doubt), "")
            if reason and doubts:
                found[request_id] = reason
        return found

    def use(self) -> SenderUse:
        """What is held now."""
        moving = [
            one.moving
            for offer in self._ledger.offers.values()
            for one in offer.slices.values()
            if one.moving
        ]
        return SenderUse(
            len(self._ledger.peers),
            len(self._ledger.offers),
            sum(len(waiting) for waiting in self._ledger.unclaimed.values()),
            sum(one.num_handles for one in moving),
            self._bounce.bytes_in_use if self._bounce else 0,
            self._num_dropped,
        )

    def close(self) -> None:
        """Give the registration back. No-op if closed.

        Raises
        ------
        InvalidState
            While a request has no outcome: abort it, and go on with `progress`.
        """
        if self._registration is None:
            return
        without = len(self._ledger.offers)
        if without:
            raise InvalidState(
                f"[close] every request must have its outcome first, got {without} without; abort "
                "them and call progress until all have ended"
            )
        self._transport.deregister(self._registration)
        self._registration = None

    # --- parts ---

    def _receive(self, peer: str, message: bytes) -> None:
        """Believe nothing: what is malformed, or of a stranger, is counted and dropped."""
        known = self._ledger.peers.get(peer)
        try:
            data = decode_message(message)
        except PeerDataError:
            known = None
        if known is None or known.leaving:
            self._num_dropped += 1
        elif isinstance(data, RequestData):
            self._ledger.take_request(peer, data)
        elif isinstance(data, Cancel):
            self._ledger.take_cancel(peer, data)
        elif isinstance(data, Ping):
            with contextlib.suppress(PeerLostError):  # then its transfers will say so
                self._transport.send(peer, encode_message(Pong()))
        else:
            self._num_dropped += 1

    def _extend(
        self, offer: Offer, pages: Iterable[PageList], computed: int, ready: Ready | None
    ) -> None:
        offer.extend(self._table, pages, computed)
        offer.touched = self._clock()
        if ready is None and not offer.marks:
            offer.computed = computed
        else:
            offer.marks.append((computed, ready or Done()))
