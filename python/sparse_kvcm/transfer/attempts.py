"""A request on its way in: its slices, and where it stands.

    QUEUED -> ADMITTED -> complete: the manager's to decode
       |         |
       |         +-> DRAINING   it has failed, its pages still belong to slices without a result
       +-> failed

Slice 0 has the pages on the GPU, for all tokens; each other slice some pages of history, which
arrive in staging.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.bounce import Landing
from sparse_kvcm.transfer.copier import Copy


@dataclass(frozen=True)
class ReceiverOptions:
    """How a receiver works.

    Attributes
    ----------
    slice_pages : int
        Most pages of history in a slice; where there are several peers, at most half of staging.
    max_in_flight : int
        Most requests that are admitted and not complete.
    max_queued : int
        Most that wait for room; 0: who finds none is refused.
    num_workers : int
        Threads that repack.
    expiry_s : float
        Seconds that a request may wait for room, a slice for its result, and after that a peer for
        its last chance.
    silence_s : float
        Seconds that a peer from which something is awaited may leave a Ping without an answer; then
        its requests fail, and after as many again it is taken for gone, and their pages come back.
        A Ping goes out after a quarter as long without a word. Longer than the longest pause
        between two calls of a sender's `progress`.

    Raises
    ------
    InvalidArgument
        With a value under which nothing would ever come, or end.
    """

    slice_pages: int = 8
    max_in_flight: int = 64
    max_queued: int = 1024
    num_workers: int = 2
    expiry_s: float = 120.0
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        least = {"slice_pages": 1, "max_in_flight": 1, "max_queued": 0, "num_workers": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidArgument(
                    f"[ReceiverOptions] {name} must be an int >= {low}, got {value!r}"
                )
        for name in ("expiry_s", "silence_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InvalidArgument(
                    f"[ReceiverOptions] {name} must be > 0 and finite, got {value!r}"
                )


@dataclass(frozen=True)
class Received:
    """A request that is through.

    Attributes
    ----------
    request_id : str
    key : int
        The manager's name of it.
    reason : str
        Why it failed, and the manager does not have it; empty if it can be decoded.
    """

    request_id: str
    key: int
    reason: str = ""


@dataclass(frozen=True)
class ReceiverUse:
    """What a receiver has in use; all 0 when nothing is on its way.

    Attributes
    ----------
    queued, admitted, draining : int
        Requests.
    posted, scattering, repacking : int
        Slices.
    staging : int
        Slots.
    bounce_bytes : int
        Of the bounce region.
    """

    queued: int = 0
    admitted: int = 0
    draining: int = 0
    posted: int = 0
    scattering: int = 0
    repacking: int = 0
    staging: int = 0
    bounce_bytes: int = 0


class Stage(enum.Enum):
    """Where a request stands."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    DRAINING = "draining"


class SliceStage(enum.Enum):
    """Where a slice stands. POSTED: its pages belong to the peer."""

    PLANNED = "planned"
    POSTED = "posted"
    SCATTERING = "scattering"
    REPACKING = "repacking"
    ENDED = "ended"


@dataclass(eq=False)
class Slice:
    """A part of a request.

    Attributes
    ----------
    first_page, num_pages : int
        Of its history; none in slice 0.
    tokens : (int, int)
        From, to.
    since : float
        When it was posted, in the receiver's seconds.
    slots : list of int
        Of staging, while it has some.
    landing, scatter : optional
        Its part of the bounce region, and copies from there.
    """

    index: int
    first_page: int
    num_pages: int
    tokens: tuple[int, int]
    stage: SliceStage = SliceStage.PLANNED
    since: float = 0.0
    slots: list[int] = field(default_factory=list)
    jobs: list[Future[None]] = field(default_factory=list)
    landing: Landing | None = None
    scatter: Copy | None = None


@dataclass(eq=False)
class Attempt:
    """A request.

    Attributes
    ----------
    number : int
        Never used twice by a receiver.
    key : int
        The manager's name of it.
    since : float
        When it came to this stage, or moved on in it.
    lacks : str
        While QUEUED: the limit that binds.
    reason : str
        Why it failed.
    """

    number: int
    request_id: str
    key: int
    peer: str
    prompt_tokens: int
    max_tokens: int
    since: float
    slices: list[Slice] = field(default_factory=list)
    stage: Stage = Stage.QUEUED
    lacks: str = ""
    reason: str = ""

    def in_stage(self, stage: SliceStage) -> Iterator[Slice]:
        """Slices that stand there."""
        return (one for one in self.slices if one.stage is stage)

    def overdue(self, now: float, most: float) -> str:
        """Why it has waited too long, longer than `most` seconds; empty if it has not."""
        posted = [one.since for one in self.in_stage(SliceStage.POSTED)]
        if self.stage is Stage.ADMITTED:
            late = now - min(posted, default=self.since) > most
            one = next(self.in_stage(SliceStage.PLANNED), None)
            waits = not posted and one is not None and one.num_pages > 0
            why = "there was no staging for it" if waits else "nothing of it came"
        elif self.stage is Stage.DRAINING:
            late, why = now - self.since > most and bool(posted), "no result of a cancel"
        else:
            late, why = now - self.since > most, f"no room ({self.lacks})"
        return f"{why} within {most:g} s" if late else ""

    @property
    def is_settled(self) -> bool:
        """Whether nobody writes to its pages or reads its staging."""
        return all(one.stage in (SliceStage.PLANNED, SliceStage.ENDED) for one in self.slices)

    @property
    def is_complete(self) -> bool:
        """Whether everything has arrived and is repacked."""
        return all(one.stage is SliceStage.ENDED for one in self.slices)


def use_of(attempts: Collection[Attempt], staging: int, bounce_bytes: int) -> ReceiverUse:
    """What requests have in use, besides slots of staging and bytes of the bounce region."""
    stages = [one.stage for one in attempts]
    slices = [one.stage for attempt in attempts for one in attempt.slices]
    return ReceiverUse(
        queued=stages.count(Stage.QUEUED),
        admitted=stages.count(Stage.ADMITTED),
        draining=stages.count(Stage.DRAINING),
        posted=slices.count(SliceStage.POSTED),
        scattering=slices.count(SliceStage.SCATTERING),
        repacking=slices.count(SliceStage.REPACKING),
        staging=staging,
        bounce_bytes=bounce_bytes,
    )


def posted_pages(attempts: Iterable[Attempt]) -> Counter[str]:
    """Slots of staging that peers may write to, by peer."""
    found: Counter[str] = Counter()
    for attempt in attempts:
        found[attempt.peer] += sum(one.num_pages for one in attempt.in_stage(SliceStage.POSTED))
    return found


def plan_slices(tokens: int, page_tokens: int, num_pages: int, slice_pages: int) -> list[Slice]:
    """Slices of a request, `num_pages` pages of history in parts of `slice_pages`.

    Examples
    --------
    >>> [(one.first_page, one.num_pages, one.tokens) for one in plan_slices(20, 8, 3, 2)]
    [(0, 0, (0, 20)), (0, 2, (0, 16)), (2, 1, (16, 20))]
    """
    slices = [Slice(0, 0, 0, (0, tokens))]
    for first in range(0, num_pages, slice_pages):
        last = min(num_pages, first + slice_pages)
        part = (first * page_tokens, min(tokens, last * page_tokens))
        slices.append(Slice(len(slices), first, last - first, part))
    return slices
