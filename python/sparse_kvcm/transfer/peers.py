"""Whom a receiver has met, how their pages lie in its own, and whether they still answer.

Silence counts only while something is awaited, and only from a Ping on: a peer that had nothing to
say, and a receiver that was not called for a while, are not mistaken for a peer that died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from sparse_kvcm.transfer.page_table import PageTable, PeerDataError
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.transport import PeerLostError, Transport
from sparse_kvcm.transfer.wire import Ping, decode_card, encode_message

PINGS = 4  # a Ping goes out after this part of the silence that is borne


@dataclass
class _Watched:
    """When a peer was last heard, or began to be awaited; since when a Ping has no answer."""

    heard: float
    asked: float | None = None


class Peers:
    """Senders that a receiver has met.

    Parameters
    ----------
    transport : Transport
    table : PageTable
        The receiver's.
    silence_s : float
        See `ReceiverOptions`.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        transport: Transport,
        table: PageTable,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._table = table
        self._silence_s = silence_s
        self._clock = clock
        self._projections: dict[str, Projection] = {}
        self._watched: dict[str, _Watched] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._projections

    def __len__(self) -> int:
        return len(self._projections)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._projections))

    def add(self, card: bytes) -> str:
        """Learn of a peer; its name. Again for a known one: its card is renewed.

        Raises
        ------
        PeerDataError
            If the card is malformed, of another engine or name, or of one that lacks buffers.
        """
        seen = decode_card(card)
        if seen.transport != self._transport.kind:
            raise PeerDataError(
                f"[add_peer] transport must be {self._transport.kind}, got {seen.transport}"
            )
        projection = Projection(seen.page_table(), self._table)
        name = self._transport.add_peer(seen.metadata)
        if name != seen.name:
            if name not in self:
                self._transport.remove_peer(name)
            raise PeerDataError(f"[add_peer] metadata must be of {seen.name!r}, got {name!r}")
        self._projections[name] = projection
        return name

    def remove(self, peer: str) -> None:
        """Forget a peer."""
        del self._projections[peer]
        self._watched.pop(peer, None)
        self._transport.remove_peer(peer)

    def projection(self, peer: str) -> Projection:
        """From its pages to the receiver's."""
        return self._projections[peer]

    def hear(self, peer: str) -> None:
        """It has said something."""
        if peer in self._watched:
            self._watched[peer] = _Watched(self._clock())

    def watch(self, awaited: Collection[str]) -> list[tuple[str, bool]]:
        """Ask peers that are awaited and quiet; those that are silent, and whether for good."""
        now, silent = self._clock(), []
        self._watched = {one: self._watched.get(one, _Watched(now)) for one in awaited}
        for peer, one in self._watched.items():
            if one.asked is not None:
                silence = now - one.asked
                if silence >= self._silence_s:
                    silent.append((peer, silence >= 2 * self._silence_s))
            elif now - one.heard >= self._silence_s / PINGS:
                one.asked = now
                try:
                    self._transport.send(peer, encode_message(Ping()))
                except PeerLostError:
                    silent.append((peer, True))
        return silent
