"""Whom a receiver has met, and how their pages lie in its own."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kvcm.transfer.page_table import PageTable, PeerDataError
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.transport import Transport
from sparse_kvcm.transfer.wire import decode_card


class Peers:
    """Senders that a receiver has met.

    Parameters
    ----------
    transport : Transport
    table : PageTable
        The receiver's.
    """

    def __init__(self, transport: Transport, table: PageTable) -> None:
        self._transport = transport
        self._table = table
        self._projections: dict[str, Projection] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._projections

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
        self._transport.remove_peer(peer)

    def projection(self, peer: str) -> Projection:
        """From its pages to the receiver's."""
        return self._projections[peer]
