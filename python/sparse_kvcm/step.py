"""Preparing one step of an engine: who takes part, in which order, on which rows.

The logic that DSA and DeepSeek-V4 managers share, against a small protocol, so without memory. The
order of a preparation is its contract: what a failed forward left is cleared, requests are put in
the forward's order, the batch is checked, and only then is a row bound. Were rows bound in another
order, the tensors that the forward reads would belong to other requests than it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from sparse_kvcm._core import InvalidArgument, OutOfPages

PADDING = -1


@dataclass(eq=False)
class StepRequest:
    """What an engine says of a request for one step.

    Attributes
    ----------
    request_id : int
        Known to the manager.
    history : int
        Tokens that it has before the step.
    new_tokens : int
        Tokens that the step adds.
    batch_index : int, optional
        Its place in the last forward, which the engine keeps; None for one that comes in now.
    beam_width : int
    is_context : bool
        Whether its prompt is computed, not a token decoded.
    """

    request_id: int
    history: int
    new_tokens: int = 1
    batch_index: int | None = None
    beam_width: int = 1
    is_context: bool = False

    @property
    def length(self) -> int:
        """Tokens that it has after the step."""
        return self.history + self.new_tokens


@dataclass(frozen=True)
class PreparedStep:
    """A step that is open.

    Attributes
    ----------
    requests : tuple of StepRequest
        In the order of the forward.
    rows : tuple of int
        Row of each, then -1 for graph padding.
    dirty : frozenset of int
        Rows whose device tables were written since the step before.
    """

    requests: tuple[StepRequest, ...]
    rows: tuple[int, ...]
    dirty: frozenset[int]


class StepBackend(Protocol):
    """What a preparation needs of a manager."""

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""

    def abort_open_step(self) -> None:
        """Drop every pending write and fetch of a step that did not end. No-op without one."""

    def frontier(self, request_id: int) -> int | None:
        """Tokens that the manager has of a request; None for one that it does not know."""

    def row_of(self, request_id: int) -> int | None:
        """Its seat, or None."""

    def seat(self, request_id: int) -> int:
        """Bind a row."""

    def unseat(self, request_id: int) -> None:
        """Undo `seat`."""

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """Make room for tokens by row. What came back says why a row has none."""

    def publish(self) -> Iterable[int]:
        """Open the step; rows whose device tables were written."""


def forward_order(requests: Iterable[StepRequest]) -> list[StepRequest]:
    """Sort as the forward runs them: those that come in now, then others as they were. Stable."""
    return sorted(requests, key=lambda r: -1 if r.batch_index is None else r.batch_index)


def check_types(requests: Iterable[StepRequest]) -> list[StepRequest]:
    """The requests, all of whose numbers are integers.

    Raises
    ------
    InvalidArgument
        Naming what is not.
    """
    made = list(requests) if isinstance(requests, Iterable) else [requests]
    for one in made:
        if not isinstance(one, StepRequest):
            raise InvalidArgument(f"[prepare_step] requests must be StepRequests, got {one!r:.40}")
        for name in ("request_id", "history", "new_tokens", "batch_index", "beam_width"):
            value = getattr(one, name)
            if not is_int(value) and not (value is None and name == "batch_index"):
                raise InvalidArgument(
                    f"[prepare_step] {name} of request {one.request_id!r} must be an int, "
                    f"got {value!r}"
                )
        if not isinstance(one.is_context, bool):
            raise InvalidArgument(
                f"[prepare_step] is_context of request {one.request_id!r} must be a bool, "
                f"got {one.is_context!r}"
            )
    return made


def check_batch(backend: StepBackend, requests: Sequence[StepRequest]) -> None:
    """Refuse a batch that no manager can run.

    Raises
    ------
    InvalidArgument
        For too many requests, one named twice, one that the manager does not know, one whose
        history is not what the manager has of it, or one with beams.
    """
    if len(requests) > backend.max_rows:
        raise InvalidArgument(
            f"[prepare_step] requests must be at most {backend.max_rows}, got {len(requests)}"
        )
    seen: set[int] = set()
    for request in requests:
        name = f"request {request.request_id}"
        if request.request_id in seen:
            raise InvalidArgument(f"[prepare_step] {name} must be named once")
        seen.add(request.request_id)
        frontier = backend.frontier(request.request_id)
        if frontier is None:
            raise InvalidArgument(f"[prepare_step] {name} must be one of the manager's; add it")
        if request.history != frontier:
            raise InvalidArgument(
                f"[prepare_step] history of {name} must be {frontier}, the tokens that the manager "
                f"has, got {request.history}"
            )
        if request.new_tokens < 1:
            raise InvalidArgument(
                f"[prepare_step] new_tokens of {name} must be >= 1, got {request.new_tokens}"
            )
        if request.beam_width != 1:
            raise InvalidArgument(
                f"[prepare_step] beam_width of {name} must be 1, got {request.beam_width}"
            )


def check_decode_batch(requests: Sequence[StepRequest], most_new_tokens: int = 1) -> None:
    """Refuse what a decode-only worker cannot run.

    Raises
    ------
    InvalidArgument
        For a request that computes its prompt, or adds more than `most_new_tokens`.
    """
    for request in requests:
        name = f"request {request.request_id}"
        if request.is_context:
            raise InvalidArgument(
                f"[prepare_step] {name} must decode: a decode-only worker takes no prompt, no "
                "chunk of one and no mixed batch; prompts come in through import_history"
            )
        if request.new_tokens > most_new_tokens:
            raise InvalidArgument(
                f"[prepare_step] new_tokens of {name} must be <= {most_new_tokens}, "
                f"got {request.new_tokens}"
            )


def _check_size(backend: StepBackend, num_requests: int, padded_size: int) -> None:
    if not is_int(padded_size) or not num_requests <= padded_size <= backend.max_rows:
        raise InvalidArgument(
            f"[prepare_step] padded_size must be in [{num_requests} requests, {backend.max_rows}], "
            f"got {padded_size!r}"
        )


def is_int(value: object) -> bool:
    """Whether something is an integer, of Python or NumPy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def prepare(
    backend: StepBackend,
    requests: Iterable[StepRequest],
    *,
    padded_size: int | None = None,
    decode_only: bool = True,
) -> PreparedStep:
    """Open a step for these requests.

    Parameters
    ----------
    backend : StepBackend
    requests : iterable of StepRequest
        In any order.
    padded_size : int, optional
        Rows of the graph that will run it; what requests leave of them is padding, at the end.
    decode_only : bool
        Whether prompts are refused.

    Raises
    ------
    InvalidArgument
        For a batch that cannot be; nothing has changed then, but that an open step was aborted.
    OutOfPages
        If rows cannot grow, naming their requests. No step is open, and who was seated here is not.
    """
    backend.abort_open_step()
    order = forward_order(check_types(requests))
    check_batch(backend, order)
    if decode_only:
        check_decode_batch(order)
    size = len(order) if padded_size is None else padded_size
    _check_size(backend, len(order), size)
    come: list[int] = []
    try:
        rows = []
        for request in order:
            row = backend.row_of(request.request_id)
            if row is None:
                row = backend.seat(request.request_id)
                come.append(request.request_id)
            rows.append(row)
        by_row = dict(zip(rows, order, strict=True))
        refused = backend.grow({row: request.length for row, request in by_row.items()})
        if refused:
            raise OutOfPages(_refusal(refused, by_row))
        dirty = frozenset(backend.publish())
    except BaseException:
        for request_id in reversed(come):
            backend.unseat(request_id)
        raise
    padding = [PADDING] * (size - len(rows))
    return PreparedStep(tuple(order), (*rows, *padding), dirty)


def _refusal(refused: Mapping[int, str], by_row: Mapping[int, StepRequest]) -> str:
    reasons = ", ".join(
        f"request {by_row[row].request_id} ({reason})" for row, reason in sorted(refused.items())
    )
    return f"[prepare_step] no room for {reasons}; suspend or free a request and try again"
