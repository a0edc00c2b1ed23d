"""Transfers by NIXL: https://github.com/ai-dynamo/nixl, of which a wheel is all that is needed.

Measured on two cores (UCX, loopback): 6 to 10 us per descriptor whatever its size, 5 GB/s of bulk.
So ranges should be whole pages or more, which `transport.merged` makes of them.

UCX chooses among all networks that it finds; UCX_NET_DEVICES names those that it may use.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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

MODULES = ("nixl_cu13", "nixl_cu12", "nixl")  # the wheels of each CUDA, and of both
_ALL = Region(0, 1 << 63, "DRAM")
INSTALL = "pip install --no-deps nixl-cu13==1.5.1 (sparse_kvcm's extra: nixl)"


def load() -> Any:
    """NIXL's module.

    Raises
    ------
    ImportError
        That says what to install.
    """
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error
    raise ImportError(f"[NixlTransport] NIXL is not installed: {INSTALL}") from reason


@dataclass
class _Transfer:
    """NIXL's handle; None once it is released, which it is as soon as it is terminal."""

    handle: Any
    state: TransferState = TransferState.PENDING
    started: bool = False
    canceled: bool = False


class NixlTransport(Transport):
    """A NIXL agent with one backend; see `Transport` for the calls.

    Parameters
    ----------
    name : str
        Unique among all agents that meet.
    backend : str
        That moves bytes.
    options : mapping of str to str
        Of the backend, such as ``{"ucx_error_handling_mode": "none"}``, which lets UCX use shared
        memory alone, and not notice a peer that died.

    Raises
    ------
    ImportError
        Without NIXL.
    TransferRefusedError
        If the backend cannot be made.
    """

    kind = "nixl"

    def __init__(
        self, name: str, backend: str = "UCX", options: Mapping[str, str] | None = None
    ) -> None:
        nixl = load()
        self.name = name
        self._transfers: dict[int, _Transfer] = {}
        self._registered: dict[int, list[Any]] = {}
        self._peers: set[str] = set()
        self._num_handles = 0
        try:
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
            self._agent.create_backend(backend, dict(options or {}))
        except Exception as error:
            raise TransferRefusedError(f"[NixlTransport] no backend {backend}: {error}") from error

    # --- memory and peers ---

    def register(self, regions: Sequence[Region]) -> Registration:
        """See `Transport`."""
        done: list[Any] = []
        try:
            for memory in sorted({one.memory for one in regions}):
                rows = [(r.address, r.size, r.device, "") for r in regions if r.memory == memory]
                done.append(self._agent.register_memory(rows, memory))
        except Exception as error:
            for one in done:
                self._agent.deregister_memory(one)
            raise TransferRefusedError(f"[register] NIXL refuses: {error}") from error
        self._num_handles += 1
        self._registered[self._num_handles] = done
        return self._num_handles

    def deregister(self, registration: Registration) -> None:
        """See `Transport`."""
        if self._transfers:
            raise TransferRefusedError("[deregister] all handles must be released before")
        for one in self._registered.pop(registration):  # type: ignore[call-overload]
            self._agent.deregister_memory(one)

    def metadata(self) -> bytes:
        """See `Transport`."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """See `Transport`."""
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferRefusedError(f"[add_peer] NIXL refuses metadata: {error}") from error
        name = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        self._peers.add(name)
        return name

    def remove_peer(self, peer: str) -> None:
        """See `Transport`."""
        if peer in self._peers:
            self._peers.discard(peer)
            self._agent.remove_remote_agent(peer)

    # --- bytes ---

    def prepare(self, peer: str, route: Route, ranges: Ranges) -> Handle:
        """See `Transport`. NIXL compares ranges with what is registered on both sides.

        It forms their ends in 64 bits (1.5.1 takes 4,096 bytes from 2**64 - 1 on): we look first.
        """
        if peer not in self._peers:
            raise TransferRefusedError(f"[prepare] peer must be one that is there, got {peer!r}")
        for column in (SOURCE, TARGET):
            if not all_within(ranges[:, column], ranges[:, SIZE], [_ALL]):
                raise TransferRefusedError("[prepare] every range must have bytes, below 2**63")
        try:
            here = self._descriptors(ranges[:, SOURCE], ranges, route.source_device, route.source)
            there = self._descriptors(ranges[:, TARGET], ranges, route.target_device, route.target)
            handle = self._agent.initialize_xfer("WRITE", here, there, peer, b"")
        except Exception as error:
            raise TransferRefusedError(f"[prepare] NIXL refuses: {error}") from error
        self._num_handles += 1
        self._transfers[self._num_handles] = _Transfer(handle)
        return self._num_handles

    def start(self, handle: Handle) -> None:
        """See `Transport`."""
        one = self._find(handle)
        one.started = True
        self._enter(one, self._agent.transfer(one.handle))

    def poll(self, handle: Handle) -> TransferState:
        """See `Transport`."""
        one = self._find(handle)
        if one.started and one.state is TransferState.PENDING:
            try:
                answer = self._agent.check_xfer_state(one.handle)
            except Exception:  # what NIXL raises here is the transfer's error
                answer = "ERR"
            self._enter(one, answer)
        return one.state

    def cancel(self, handle: Handle) -> None:
        """See `Transport`."""
        one = self._find(handle)
        one.canceled = True
        if one.state is TransferState.PENDING:
            self._enter(one, "PROC" if one.started else "ERR")

    def release(self, handle: Handle) -> None:
        """See `Transport`."""
        if self._find(handle).state is TransferState.PENDING:
            raise TransferRefusedError(f"[release] transfer {handle!r} must have ended before")
        del self._transfers[handle]  # type: ignore[arg-type]

    # --- messages ---

    def send(self, peer: str, message: bytes) -> None:
        """See `Transport`."""
        if peer not in self._peers:
            raise PeerLostError(f"[send] peer {peer!r} is not there")
        try:
            self._agent.send_notif(peer, message)
        except Exception as error:
            raise PeerLostError(f"[send] peer {peer!r} cannot be reached: {error}") from error

    def receive(self) -> list[tuple[str, bytes]]:
        """See `Transport`."""
        found = self._agent.get_new_notifs()
        return [(str(peer), bytes(one)) for peer, messages in found.items() for one in messages]

    def close(self) -> None:
        """See `Transport`."""
        for peer in list(self._peers):
            self.remove_peer(peer)

    # --- parts ---

    def _find(self, handle: Handle) -> _Transfer:
        one = self._transfers.get(handle)  # type: ignore[call-overload]
        if not isinstance(one, _Transfer):
            raise TransferRefusedError(f"[NixlTransport] handle {handle!r} must be one of ours")
        return one

    def _enter(self, one: _Transfer, answer: str) -> None:
        """Note NIXL's answer. What fails or is canceled has ended once NIXL lets it go."""
        if answer == "PROC" and not one.canceled:
            return
        try:
            one.handle.release()
        except Exception:
            if answer == "DONE":
                raise
            return  # it still moves: the next poll asks again
        one.handle = None
        one.state = TransferState.DONE if answer == "DONE" else TransferState.FAILED

    def _descriptors(self, addresses: Any, ranges: Ranges, device: int, memory: str) -> Any:
        rows = np.empty((len(ranges), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, ranges[:, SIZE], device
        return self._agent.get_xfer_descs(rows, memory)
