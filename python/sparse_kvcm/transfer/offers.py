"""What a sender knows of a request: what the engine has offered, and what a receiver asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.page_table import PageTable
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.slices import Moving
from sparse_kvcm.transfer.wire import MAX_TOKENS, PageList, RequestData, check_page_list


class Ready(Protocol):
    """When pages are written. A ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether they are. Never waits."""


@dataclass(frozen=True)
class Outcome:
    """The end of an offered request: its pages are the engine's again.

    Attributes
    ----------
    reason : str
        Why it failed; empty if it is done.
    """

    request_id: str
    status: Literal["done", "failed"]
    reason: str = ""


@dataclass
class Slice:
    """A RequestData that has no result yet; `moving` once its bytes are on their way."""

    peer: str
    data: RequestData
    since: float
    moving: Moving | None = None

    @property
    def claim(self) -> tuple[str, int]:
        """Who asks: peer and attempt."""
        return self.peer, self.data.attempt

    @property
    def num_bytes(self) -> int:
        """Of its page lists."""
        return sum(len(one.packed) for one in self.data.pages)

    def is_same(self, other: Slice) -> bool:
        """Whether the other is a repetition, of the same request."""
        return self.claim == other.claim and self.data.slice_id == other.data.slice_id


@dataclass
class Peer:
    """A receiver that has been met; `num_open` of its slices have no result yet.

    `open_bytes` of page lists wait with them.
    """

    rank: RankInfo
    projection: Projection
    num_open: int = 0
    open_bytes: int = 0
    leaving: bool = False


@dataclass
class Offer:
    """A request that the engine has offered.

    Attributes
    ----------
    pages : dict of int to PageList
        By layer group.
    peer : str or None
        Who alone may ask for it, or has canceled it early; None: who asks first.
    touched : float
        When the engine or the receiver was last heard of it.
    computed : int
        Tokens that may be sent.
    marks : list of (int, Ready)
        Tokens that may be sent once an event has passed, in order.
    claim : (str, int) or None
        Peer and attempt that it is sent to.
    slices : dict of int to Slice
        Without a result yet.
    answered : set of int
        Slices with a result.
    failure : str
        Why it fails, as soon as that is known.
    is_early : bool
        It was canceled before the engine offered it.
    """

    prompt_tokens: int
    touched: float
    peer: str | None = None
    pages: dict[int, PageList] = field(default_factory=dict)
    computed: int = 0
    marks: list[tuple[int, Ready]] = field(default_factory=list)
    claim: tuple[str, int] | None = None
    num_slices: int = 0
    slices: dict[int, Slice] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    failure: str = ""
    is_early: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of it moves or will."""
        if self.failure:
            return not self.slices
        return self.claim is not None and len(self.answered) == self.num_slices

    @property
    def is_idle(self) -> bool:
        """Whether a receiver is to say what comes next."""
        return not self.slices and not self.is_over

    def has_seen(self, one: Slice) -> bool:
        """Whether this RequestData has come before."""
        seen = one.data.slice_id in self.slices or one.data.slice_id in self.answered
        return self.claim == one.claim and seen

    def objection(self, one: Slice) -> str:
        """What is wrong with a new RequestData of its claim, or nothing."""
        facts = {
            "num_slices": (self.num_slices, one.data.num_slices),
            "prompt_tokens": (self.prompt_tokens, one.data.prompt_tokens),
        }
        wrong = [
            f"{name} must be {want}, got {got}"
            for name, (want, got) in facts.items()
            if want != got
        ]
        return "; ".join(wrong)

    def take_marks(self) -> None:
        """Raise `computed` as far as pages are written."""
        while self.marks and self.marks[0][1].query():
            self.computed = self.marks.pop(0)[0]

    def extend(self, table: PageTable, pages: Iterable[PageList], computed: int) -> None:
        """Check what is added to it, then add its pages.

        Raises
        ------
        InvalidArgument
            If tokens go back or past the prompt, a layer group comes twice, or a page that was
            given before has changed.
        """
        most = self.marks[-1][0] if self.marks else self.computed
        if not _is_int(computed) or not most <= computed <= self.prompt_tokens:
            raise InvalidArgument(
                f"[Sender] computed must be an int in [{most}, {self.prompt_tokens}], got "
                f"{computed!r}"
            )
        added: dict[int, PageList] = {}
        for one in pages:
            check_page_list("Sender", one)
            if one.layer_group in added:
                raise InvalidArgument(
                    f"[Sender] pages must name a layer group once, got {one.layer_group} twice"
                )
            _check_pages(table, one, self.pages.get(one.layer_group))
            added[one.layer_group] = one
        self.pages.update(added)


def check_tokens(prompt_tokens: int) -> None:
    """Refuse a length that no message can name.

    Raises
    ------
    InvalidArgument
    """
    if not _is_int(prompt_tokens) or not 1 <= prompt_tokens <= MAX_TOKENS:
        raise InvalidArgument(
            f"[Sender] prompt_tokens must be an int in [1, {MAX_TOKENS}], got {prompt_tokens!r}"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_pages(table: PageTable, new: PageList, old: PageList | None) -> None:
    if not 0 <= new.layer_group < len(table.layer_groups):
        raise InvalidArgument(
            f"[Sender] layer_group must be in [0, {len(table.layer_groups)}), got {new.layer_group}"
        )
    num_slots = table.pool_groups[table.layer_groups[new.layer_group].pool_group].num_slots
    slots = new.slots
    if len(slots) and not -1 <= slots.min() <= slots.max() < num_slots:
        raise InvalidArgument(
            f"[Sender] slots of layer group {new.layer_group} must be in [-1, {num_slots}), got "
            f"{slots.min()} to {slots.max()}"
        )
    if old is None:
        return
    begin = old.first_page - new.first_page
    kept = slots[max(begin, 0) : begin + len(old.slots)]
    if begin < 0 or len(kept) != len(old.slots) or np.any((old.slots >= 0) & (kept != old.slots)):
        raise InvalidArgument(
            f"[Sender] pages of layer group {new.layer_group} must keep those that were given "
            f"before: they belong to the transfer, got {len(slots)} from page {new.first_page} on"
        )
