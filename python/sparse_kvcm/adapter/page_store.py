"""Requests of a `Storage`: everything on the GPU, a page table per request and row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparse_kvcm._core import (
    InvalidArgument,
    OutOfPages,
    PageRange,
    RequestPages,
    Storage,
)
from sparse_kvcm.adapter.store import check_new, is_away, no_room, no_row
from sparse_kvcm.adapter.streams import current_stream

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class _Request:
    pages: RequestPages
    max_tokens: int
    row: int | None = None
    suspended: bool = False


class PageStore:
    """A `Store` on `Storage`, whose tables are in host memory; see it for the calls.

    Parameters
    ----------
    storage : Storage
        Without selection groups. Pages of suspended requests go to its host tier, if it has one.
    max_rows : int
    max_tokens : int
        Most tokens of one request.
    """

    decodes_only = False

    def __init__(self, storage: Storage, max_rows: int, max_tokens: int) -> None:
        self.storage = storage
        self._max_tokens = max_tokens
        self._device = storage.config.device
        self._has_host = storage.layout.num_levels > 1
        max_pages = math.ceil(max_tokens / storage.config.tokens_per_block)
        shape = (len(storage.layout.layer_groups), max_rows, max_pages)
        self._tables = np.full(shape, -1, np.int32)
        self._requests: dict[int, _Request] = {}
        self._seats: list[_Request | None] = [None] * max_rows
        self._dirty: set[int] = set()  # rows whose pages may be others than the tables say
        self._written: set[int] = set()  # rows of tables that no step that ended has shown
        self._open = False
        self._leaving: list[_Request] = []  # the open step still reads their pages

    # --- requests ---

    def add(self, request_id: int, max_tokens: int) -> None:
        """See `Store`."""
        check_new(self, request_id, max_tokens, self._max_tokens)
        pages = self.storage.create_request_pages(max_tokens)
        self._requests[request_id] = _Request(pages, max_tokens)

    def take(self, request_id: int, capacity: int, history: int) -> None:
        """See `Store`."""
        one = self._requests[request_id]
        if one.suspended:
            raise is_away("import_history", request_id)
        if capacity > one.max_tokens or not one.pages.resize(capacity, history, self._stream):
            raise no_room(request_id, capacity, one.max_tokens)

    def give_back(self, request_id: int) -> None:
        """See `Store`."""
        self._requests[request_id].pages.drop_step(self._stream)

    def renew(self, request_id: int) -> None:
        """See `Store`."""
        one = self._requests[request_id]
        one.pages.close(self._stream)
        one.pages = self.storage.create_request_pages(one.max_tokens)

    def max_tokens(self, request_id: int) -> int:
        """See `Store`."""
        return self._requests[request_id].max_tokens

    def free(self, request_id: int) -> None:
        """See `Store`."""
        one = self._requests.pop(request_id)
        if self._open:
            self._leaving.append(one)
        else:
            self._release(one)

    def suspend(self, request_id: int) -> None:
        """See `Store`. Without a host tier its pages stay on the GPU."""
        one = self._requests[request_id]
        if one.suspended:
            return
        if self._has_host and not one.pages.suspend(self._stream):
            raise OutOfPages(
                f"[suspend_request] the host has no room for the pages of request {request_id}; "
                "free a suspended request, or raise cold_quota"
            )
        self._unseat(one)
        one.suspended = True

    def resume(self, request_id: int) -> None:
        """See `Store`."""
        one = self._requests[request_id]
        if one.pages.is_suspended and not one.pages.resume(self._stream):
            raise OutOfPages(
                f"[resume_request] no pages on the GPU for request {request_id} of "
                f"{one.pages.history_length} tokens; suspend or free a request and try again"
            )
        one.suspended = False

    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """See `Store`."""
        return np.asarray(self._requests[request_id].pages.get_base_page_indices(layer_group))

    # --- steps ---

    @property
    def max_rows(self) -> int:
        """See `Store`."""
        return len(self._seats)

    def abort_open_step(self) -> None:
        """See `Store`."""
        for one in self._requests.values():
            if one.pages.capacity != one.pages.history_length:
                one.pages.drop_step(self._stream)
                self._note(one)
        self._end_step()

    def frontier(self, request_id: int) -> int | None:
        """See `Store`."""
        one = self._requests.get(request_id)
        return None if one is None else one.pages.history_length

    def row_of(self, request_id: int) -> int | None:
        """See `Store`."""
        return self._requests[request_id].row

    def seat(self, request_id: int) -> int:
        """See `Store`."""
        one = self._requests[request_id]
        if one.suspended:
            raise is_away("prepare_step", request_id)
        if None not in self._seats:
            raise no_row(request_id, self.max_rows)
        row = self._seats.index(None)
        self._seats[row], one.row = one, row
        self._note(one)
        return row

    def unseat(self, request_id: int) -> None:
        """See `Store`."""
        self._unseat(self._requests[request_id])

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `Store`."""
        refused: dict[int, str] = {}
        for row, length in lengths.items():
            one = self._seated(row)
            if length > one.max_tokens:
                refused[row] = f"at most {one.max_tokens} tokens"
            elif not one.pages.resize(length, one.pages.history_length, self._stream):
                refused[row] = "OUT_OF_PAGES"
            self._note(one)
        if refused:
            self.abort_open_step()
        return refused

    def publish(self) -> Iterable[int]:
        """See `Store`."""
        for row in self._dirty:
            one = self._seats[row]
            tables = np.full_like(self._tables[:, row], -1)
            if one is not None:
                for group, table in enumerate(tables):
                    one.pages.copy_base_page_indices(group, table)
            if not np.array_equal(tables, self._tables[:, row]):
                self._tables[:, row] = tables
                self._written.add(row)
        self._dirty.clear()
        self._open = True
        return self._written

    def commit(self, rows: Sequence[int]) -> None:
        """See `Store`."""
        for row in rows:
            pages = self._seated(row).pages
            pages.resize(pages.capacity, pages.capacity, self._stream)
        self._written.clear()
        self._end_step()

    def base_tables(self, layer_group: int) -> torch.Tensor:
        """See `Store`."""
        import torch

        return torch.from_numpy(self._tables[layer_group])

    def scratch(self, request_id: int, layer_group: int) -> tuple[PageRange, np.ndarray]:
        """See `Store`."""
        pages = self._requests[request_id].pages
        slots = np.asarray(pages.get_scratch_slots(layer_group))
        return pages.get_swa_scratch_range(layer_group), slots

    def check_late_errors(self) -> None:
        """See `Store`. Nothing is reported late."""

    # --- parts ---

    @property
    def _stream(self) -> int:
        return current_stream(self._device)

    def _end_step(self) -> None:
        self._open = False
        leaving, self._leaving = self._leaving, []
        for one in leaving:
            self._release(one)

    def _release(self, request: _Request) -> None:
        request.pages.close(self._stream)
        self._unseat(request)

    def _unseat(self, request: _Request) -> None:
        if request.row is not None:
            self._seats[request.row] = None
            request.row = None

    def _seated(self, row: int) -> _Request:
        one = self._seats[row]
        if one is None:
            raise InvalidArgument(f"[PageStore] row {row} must be a seated one")
        return one

    def _note(self, request: _Request) -> None:
        if request.row is not None:
            self._dirty.add(request.row)
