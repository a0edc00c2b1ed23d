"""Where the pages of requests are and who has a row: what a manager of a model stands on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparse_kvcm._core import InvalidArgument, InvalidState, OutOfPages, PageRange, Storage
from sparse_kvcm.step import StepBackend, is_int

if TYPE_CHECKING:
    import numpy as np
    import torch


class Store(StepBackend, Protocol):
    """Requests, their pages and their rows; the `StepBackend` of a manager's steps.

    Who calls has checked that a request is known.

    Attributes
    ----------
    storage : Storage
        Of all layers, those on the host included.
    """

    storage: Storage

    @property
    def decodes_only(self) -> bool:
        """Whether prompts cannot be computed in steps."""

    # --- requests ---

    def add(self, request_id: int, max_tokens: int) -> None:
        """As `RequestManager.add_request`."""

    def take(self, request_id: int, capacity: int, history: int) -> None:
        """Give an import its pages: room for `capacity` tokens, `history` of which are computed.

        Raises
        ------
        InvalidState
            If the request is suspended.
        OutOfPages
            If there is no room; the request is as it was.
        """

    def give_back(self, request_id: int) -> None:
        """The import did not happen: pages beyond its computed tokens go back."""

    def renew(self, request_id: int) -> None:
        """Make a request without a row empty again, as `add` made it."""

    def max_tokens(self, request_id: int) -> int:
        """The most tokens that it may have."""

    def free(self, request_id: int) -> None:
        """As `RequestManager.free_request`."""

    def suspend(self, request_id: int) -> None:
        """As `RequestManager.suspend_request`."""

    def resume(self, request_id: int) -> None:
        """As `RequestManager.resume_request`."""

    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """Slots of its pages in a layer group, int32 ``[pages]``; -1 = none."""

    # --- steps, beside `StepBackend` ---

    def commit(self, rows: Sequence[int]) -> None:
        """End the open step: what it added to these rows is real."""

    def base_tables(self, layer_group: int) -> torch.Tensor:
        """Slots by row, int32 ``[max_rows, max_pages]``, on any device."""

    def scratch(self, request_id: int, layer_group: int) -> tuple[PageRange, np.ndarray]:
        """Scratch pages of the open step, and their slots; none where the range is empty."""

    def check_late_errors(self) -> None:
        """Raise what the device reported after the last step."""


def check_int(
    function: str, name: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """Refuse what is not an integer within its bounds."""
    if is_int(value) and (least is None or value >= least) and (most is None or value <= most):
        return
    bound = "" if least is None else f" >= {least}" if most is None else f" in [{least}, {most}]"
    raise InvalidArgument(f"[{function}] {name} must be an int{bound}, got {value!r}")


def check_new(store: Store, request_id: int, max_tokens: int, most: int) -> None:
    """Refuse a request that cannot be; see `RequestManager.add_request`."""
    check_int("add_request", "request_id", request_id)
    if store.frontier(request_id) is not None:
        raise InvalidArgument(f"[add_request] request_id {request_id} must be a new one")
    check_int("add_request", "max_tokens", max_tokens, 1, most)


def is_away(function: str, request_id: int) -> InvalidState:
    """What a call raises that a suspended request cannot take."""
    return InvalidState(f"[{function}] request {request_id} is suspended; resume it first")


def no_row(request_id: int, max_rows: int) -> InvalidState:
    """What a step raises where others that do not take part have all rows."""
    return InvalidState(
        f"[prepare_step] no row is free for request {request_id}: {max_rows} others have all of "
        "them; suspend or free one that takes no part"
    )


def no_room(request_id: int, tokens: int, most: int) -> OutOfPages:
    """What `Store.take` raises."""
    return OutOfPages(
        f"[import_history] no room for {tokens} tokens of request {request_id}, at most {most}; "
        "free or suspend a request and try again"
    )
