"""The decode worker of `disaggregated`: receives requests and decodes those that are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from _prefill import NAME, make_bounce

from sparse_kvcm.sizing import Ranks
from sparse_kvcm.transfer.attempts import ReceiverOptions, ReceiverUse
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.receiver import Receiver
from sparse_kvcm.transfer.target import OffloadTarget
from sparse_kvcm.transfer.transport import Transport

STAGING_SLOTS = 6
SLICE_PAGES = 2
SILENCE_S = 100.0  # a first forward on a GPU loads its kernels


@dataclass
class Outcome:
    """What decode workers did.

    Attributes
    ----------
    tokens : dict of int to list of int
        By request.
    batches : list of list of int
        Requests of each step, in their order.
    faults : list of str
    moved : dict of (str, str) to int
        Bytes, by memory type here and there.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    moved: dict[tuple[str, str], int] = field(default_factory=dict)


class Prefill(Protocol):
    """A prefill worker as this one sees it."""

    card: bytes

    def meet(self, card: bytes) -> None:
        """Learn of the decode worker."""

    def tokens(self) -> list[tuple[int, int]]:
        """Index and first token of requests that have been computed. EOFError: it has died."""


class Progress(Protocol):
    """Who is told how far it is."""

    def add_task(self, description: str, *, total: int) -> Any:
        """What will be counted."""

    def advance(self, task: Any, advance: float = 1) -> None:
        """Count."""


class Decode:
    """A decode worker. With `ranks` it decodes its share, in what all ranks agreed to have."""

    def __init__(
        self,
        model: Any,
        device: str,
        transport: Transport,
        new_tokens: int,
        rank: RankInfo | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        rank = rank or RankInfo()
        stock = model.build(device)
        longest = max(model.lengths) + new_tokens
        bounce = make_bounce(device)  # before the cache is sized
        if ranks is None:
            self.manager = model.make_manager(stock, longest, resident=False)
        else:
            self.manager = model.size_manager(stock, longest, STAGING_SLOTS, rank.rank, ranks)
        self.driver = model.make_driver(stock, self.manager)
        self.receiver = Receiver(
            transport,
            OffloadTarget(self.manager, STAGING_SLOTS),
            rank,
            ReceiverOptions(slice_pages=SLICE_PAGES, silence_s=SILENCE_S),
            bounce,
        )
        self.lengths: Sequence[int] = model.lengths
        self.indices = range(rank.rank, len(self.lengths), rank.num_ranks)
        self.new_tokens = new_tokens

    def run(self, prefill: Prefill, progress: Progress) -> Outcome:
        """Ask for its requests, and decode until each has its tokens or has failed."""
        outcome, first, arrived = Outcome(), dict[int, int](), set[int]()
        total = len(self.indices)
        received = progress.add_task("received", total=total)
        decoded = progress.add_task("decoded", total=total * self.new_tokens)
        self.receiver.add_peer(prefill.card)
        prefill.meet(self.receiver.card())
        for index in self.indices:
            length = self.lengths[index]
            self.receiver.request(NAME, str(index), index, length, length + self.new_tokens)
        requests: dict[Any, int] = {}
        while len(outcome.tokens) + len(outcome.faults) < total:
            try:
                first.update(prefill.tokens())
            except (EOFError, OSError):
                self.receiver.remove_peer(NAME, "its process has ended")
            for one in self.receiver.poll():
                progress.advance(received)
                if one.reason:
                    outcome.faults.append(f"request {one.request_id}: {one.reason}")
                else:
                    arrived.add(one.key)
            for index in sorted(arrived & first.keys()):
                arrived.discard(index)
                request = self.driver.adopt(index, first[index], self.new_tokens)
                requests[request] = index
                progress.advance(decoded)
            come = len(requests) + len(outcome.tokens) + len(outcome.faults)
            is_first = not outcome.batches and len(requests) < 2 and come < total
            stepped = {} if is_first else self.driver.step()  # the first step waits for a second
            if stepped:
                outcome.batches.append([requests[one] for one in stepped])
                progress.advance(decoded, len(stepped))
            else:
                time.sleep(0.0002)
            for request in [one for one in requests if len(one.tokens) == self.new_tokens]:
                outcome.tokens[requests.pop(request)] = request.tokens
        if self.receiver.use != ReceiverUse():
            outcome.faults.append(f"not all has come back: {self.receiver.use}")
        outcome.moved.update(self.receiver.num_bytes)
        return outcome

    def close(self) -> None:
        """End it."""
        self.receiver.close(0)
        self.driver.close()
