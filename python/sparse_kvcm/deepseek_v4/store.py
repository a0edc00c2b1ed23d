"""Where pages are and who has a row: what a resident and an offloading manager differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, PageRange, Storage
from sparse_kvcm.step import StepRequest

if TYPE_CHECKING:
    import numpy as np
    import torch


class Store(ABC):
    """Requests, their pages and their rows; the `StepBackend` of a manager's steps.

    Attributes
    ----------
    storage : Storage
        Of all types, those on the host included.
    decodes_only : bool
    """

    storage: Storage
    decodes_only: bool

    # --- requests ---

    @abstractmethod
    def add(self, request_id: int, max_tokens: int) -> None:
        """Make a request. OutOfPages, and it is unknown, if there is no room."""

    @abstractmethod
    def fill(self, request_id: int, tokens: int, units: Mapping[int, np.ndarray] | None) -> None:
        """Give an empty request so many tokens: its pages, and units of the host by layer.

        OutOfPages, and it stays empty, if there is no room.
        """

    @abstractmethod
    def renew(self, request_id: int) -> None:
        """Make it empty again, as `add` made it."""

    @abstractmethod
    def max_tokens(self, request_id: int) -> int:
        """The most that it may have."""

    @abstractmethod
    def free(self, request_id: int) -> None:
        """End a request; what it had is reused once an open step no longer reads it."""

    @abstractmethod
    def suspend(self, request_id: int) -> None:
        """Give its row back, and what is kept for requests with a row."""

    @abstractmethod
    def resume(self, request_id: int) -> None:
        """Make it ready for a row. OutOfPages, and it stays suspended, if there is no room."""

    @abstractmethod
    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """Slots of its pages in a layer group, int32 ``[pages]``; -1 = none."""

    # --- steps, as `StepBackend` ---

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Most requests of a step."""

    @abstractmethod
    def abort_open_step(self) -> None:
        """Drop the step that is open, if any."""

    @abstractmethod
    def frontier(self, request_id: int) -> int | None:
        """Tokens that it has; None if it is unknown."""

    @abstractmethod
    def row_of(self, request_id: int) -> int | None:
        """Its row, or None."""

    @abstractmethod
    def seat(self, request_id: int) -> int:
        """Give it a row."""

    @abstractmethod
    def unseat(self, request_id: int) -> None:
        """Take its row."""

    @abstractmethod
    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """Make room for tokens by row; why a row has none."""

    @abstractmethod
    def publish(self) -> Iterable[int]:
        """Open the step; rows whose tables were written."""

    @abstractmethod
    def commit(self, rows: Sequence[int], requests: Sequence[StepRequest]) -> None:
        """End the step; its tokens are real."""

    @abstractmethod
    def base_tables(self, layer_group: int) -> torch.Tensor:
        """Slots by row, int32 ``[max_rows, max_pages]``, on any device."""

    @abstractmethod
    def scratch(self, request_id: int, layer_group: int) -> tuple[PageRange, np.ndarray]:
        """Scratch pages of the open step, and their slots; none where the range is empty."""

    @abstractmethod
    def check_late_errors(self) -> None:
        """Raise what the device reported after the last step."""


def check_new(store: Store, request_id: int, max_tokens: int, most: int) -> None:
    """Refuse a request that cannot be.

    Raises
    ------
    InvalidArgument
        For an id in use, or more tokens than there may be.
    """
    if store.frontier(request_id) is not None:
        raise InvalidArgument(f"[add_request] request_id {request_id} must be a new one")
    if not 1 <= max_tokens <= most:
        raise InvalidArgument(f"[add_request] max_tokens must be in [1, {most}], got {max_tokens}")
