"""The prefill worker of `disaggregated`: runs prompts and sends what they leave.

Everything stays on its device, in a resident manager. It lives in a process of its own, which talks
to the decode worker through a pipe, or, where there is no NIXL, in the same process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from _models import MODELS
from v4 import prompt

from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.nixl import NixlTransport
from sparse_kvcm.transfer.sender import Sender
from sparse_kvcm.transfer.source import ResidentSource
from sparse_kvcm.transfer.transport import Transport

NAME = "prefill"
BOUNCE_BYTES = 32 << 20
BOUNCE_MIN_BYTES = 4096  # tiny models have tiny pages


def make_bounce(device: str) -> Bounce | None:
    """Where small pages between GPUs go together."""
    if device == "cpu":
        return None
    index = torch.device(device).index or 0
    return Bounce.on_gpu(index, BOUNCE_BYTES, min_bytes=BOUNCE_MIN_BYTES)


def make_nixl(name: str, device: str) -> NixlTransport:
    """A NIXL agent. UCX looks for GPUs when it is made, and wants a CUDA context then."""
    if device != "cpu":
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.zeros(1, device=device)
    return NixlTransport(name)


class Prefill:
    """A model, a resident manager, and a sender."""

    def __init__(
        self, kind: str, lengths: Sequence[int], device: str, transport: Transport
    ) -> None:
        torch.set_num_threads(1)
        model = MODELS[kind]()
        model.lengths = tuple(lengths)
        stock = model.build(device)
        self._model = model
        self._manager = model.make_manager(stock, max(lengths) + 2, resident=True)
        self._driver = model.make_driver(stock, self._manager)
        self._source = ResidentSource(self._manager)
        self._sender = Sender(transport, self._source.table, bounce=make_bounce(device))
        self._sent: dict[str, Any] = {}
        self._device = device

    def card(self) -> bytes:
        """For the decode worker."""
        return self._sender.card()

    def meet(self, card: bytes) -> None:
        """Learn of the decode worker."""
        self._sender.add_peer(card)

    def compute(self, index: int) -> int:
        """Run a prompt and offer what it leaves; its first token."""
        length = self._model.lengths[index]
        request = self._driver.add(prompt(length), 2)  # one more, so that it stays
        ready = None
        if self._device != "cpu":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        pages = self._source.pages(self._model.id_of(request))
        self._sender.offer(str(index), length, pages, ready=ready)
        self._sent[str(index)] = request
        token: int = request.tokens[0]
        return token

    def progress(self) -> None:
        """Send; requests whose pages have come back end."""
        for outcome in self._sender.progress():
            self._driver.remove(self._sent.pop(outcome.request_id))

    @property
    def is_done(self) -> bool:
        """Whether all that was offered has ended."""
        return not self._sent


class Inline:
    """A prefill worker in this process."""

    def __init__(
        self, kind: str, lengths: Sequence[int], device: str, transport: Transport
    ) -> None:
        self._prefill = Prefill(kind, lengths, device, transport)
        self._left = list(range(len(lengths)))
        self.card = self._prefill.card()

    def meet(self, card: bytes) -> None:
        """Learn of the decode worker."""
        self._prefill.meet(card)

    def tokens(self) -> list[tuple[int, int]]:
        """Index and first token of requests that have been computed; never raises EOFError."""
        self._prefill.progress()
        if not self._left:
            return []
        index = self._left.pop(0)
        return [(index, self._prefill.compute(index))]

    def close(self) -> None:
        """Nothing is left to end."""
        self._prefill.progress()


class Process:
    """A prefill worker in a process of its own, over NIXL."""

    def __init__(self, kind: str, lengths: Sequence[int], device: str, num_peers: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(kind, tuple(lengths), device, num_peers, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.card: bytes = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("the prefill process has ended; it said why above") from error

    def meet(self, card: bytes) -> None:
        """Learn of the decode worker."""
        self._pipe.send(card)

    def tokens(self) -> list[tuple[int, int]]:
        """Index and first token of requests that have been computed. EOFError: it has died."""
        found = []
        while self._pipe.poll():
            found.append(self._pipe.recv())
        return found

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(kind: str, lengths: Sequence[int], device: str, num_peers: int, pipe: Connection) -> None:
    """Be a prefill worker until the pipe ends."""
    prefill = Prefill(kind, lengths, device, make_nixl(NAME, device))
    try:
        pipe.send(prefill.card())
        for _ in range(num_peers):
            prefill.meet(pipe.recv())
        for index in range(len(lengths)):
            pipe.send((index, prefill.compute(index)))
            prefill.progress()
        while not (pipe.poll() and prefill.is_done):  # the pipe's end can be read
            prefill.progress()
            time.sleep(0.0002)
    except (EOFError, OSError):  # the decode worker has ended
        return
