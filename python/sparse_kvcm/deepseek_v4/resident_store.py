"""Everything on the GPU: a page table per request, and prompts in steps too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparse_kvcm._core import (
    InvalidArgument,
    InvalidState,
    OutOfPages,
    PageRange,
    RequestPages,
    Storage,
)
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.store import Store, check_new
from sparse_kvcm.dsa.streams import current_stream
from sparse_kvcm.step import StepRequest

if TYPE_CHECKING:
    import torch


@dataclass
class _Request:
    pages: RequestPages
    max_tokens: int
    history: int = 0
    row: int | None = None
    suspended: bool = False


class ResidentStore(Store):
    """A `Store` on `Storage`; see it for the calls."""

    decodes_only = False

    def __init__(self, config: DeepseekV4CacheConfig) -> None:
        self._config = config
        self.storage = Storage(config.resident_storage())
        groups = len(self.storage.layout.layer_groups)
        shape = (groups, config.max_batch_size, config.max_pages)
        self._tables = np.full(shape, -1, np.int32)
        self._requests: dict[int, _Request] = {}
        self._seats: list[int | None] = [None] * config.max_batch_size
        self._dirty: set[int] = set()
        self._open = False
        self._leaving: list[int] = []

    # --- requests ---

    def add(self, request_id: int, max_tokens: int) -> None:
        """See `Store`."""
        check_new(self, request_id, max_tokens, self._config.max_seq_len)
        pages = self.storage.create_request_pages(max_tokens)
        self._requests[request_id] = _Request(pages, max_tokens)

    def fill(self, request_id: int, tokens: int, units: Mapping[int, np.ndarray] | None) -> None:
        """See `Store`."""
        del units  # are written to their pages
        request = self._requests[request_id]
        if tokens > request.max_tokens or not request.pages.resize(tokens, tokens, self._stream):
            raise OutOfPages(
                f"[import_history] no room for {tokens} tokens of request {request_id}, at most "
                f"{request.max_tokens}; free a request and try again"
            )
        request.history = tokens
        self._note(request)

    def renew(self, request_id: int) -> None:
        """See `Store`."""
        most = self._requests[request_id].max_tokens
        self._requests[request_id].pages.close(self._stream)
        self._requests[request_id] = _Request(self.storage.create_request_pages(most), most)

    def max_tokens(self, request_id: int) -> int:
        """See `Store`."""
        return self._requests[request_id].max_tokens

    def free(self, request_id: int) -> None:
        """See `Store`."""
        if self._open:
            self._leaving.append(request_id)
            return
        self._requests[request_id].pages.close(self._stream)
        self.unseat(request_id)
        del self._requests[request_id]

    def suspend(self, request_id: int) -> None:
        """See `Store`. Pages stay on the GPU."""
        if self._open:
            raise InvalidState("[suspend_request] a step is open; end or abort it first")
        self.unseat(request_id)
        self._requests[request_id].suspended = True

    def resume(self, request_id: int) -> None:
        """See `Store`."""
        self._requests[request_id].suspended = False

    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """See `Store`."""
        pages = self._requests[request_id].pages
        return np.asarray(pages.get_base_page_indices(layer_group))

    # --- steps ---

    @property
    def max_rows(self) -> int:
        """See `Store`."""
        return self._config.max_batch_size

    def abort_open_step(self) -> None:
        """See `Store`."""
        self._open = False
        for request in self._requests.values():
            # Who grew has its history in its pages since then; of the others nothing may go.
            if request.pages.capacity != request.history:
                request.pages.drop_step(self._stream)
                self._note(request)
        self._let_go()

    def frontier(self, request_id: int) -> int | None:
        """See `Store`."""
        request = self._requests.get(request_id)
        return None if request is None or request_id in self._leaving else request.history

    def row_of(self, request_id: int) -> int | None:
        """See `Store`."""
        return self._requests[request_id].row

    def seat(self, request_id: int) -> int:
        """See `Store`."""
        if self._requests[request_id].suspended:
            raise InvalidState(f"[prepare_step] request {request_id} is suspended; resume it first")
        if None not in self._seats:
            raise InvalidState(f"[prepare_step] no row is free for request {request_id}")
        row = self._seats.index(None)
        self._seats[row] = request_id
        self._requests[request_id].row = row
        self._note(self._requests[request_id])
        return row

    def unseat(self, request_id: int) -> None:
        """See `Store`."""
        request = self._requests[request_id]
        if request.row is not None:
            self._seats[request.row] = None
            request.row = None

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `Store`."""
        refused: dict[int, str] = {}
        for row, length in lengths.items():
            request = self._seated(row)
            if length > request.max_tokens:
                refused[row] = f"at most {request.max_tokens} tokens"
            elif not request.pages.resize(length, request.history, self._stream):
                refused[row] = "OUT_OF_PAGES"
            self._note(request)
        if refused:
            self.abort_open_step()
        return refused

    def publish(self) -> Iterable[int]:
        """See `Store`."""
        for row in self._dirty:
            self._tables[:, row] = -1
            if self._seats[row] is not None:
                pages = self._seated(row).pages
                for group, table in enumerate(self._tables):
                    pages.copy_base_page_indices(group, table[row])
        dirty, self._dirty = self._dirty, set()
        self._open = True
        return dirty

    def commit(self, rows: Sequence[int], requests: Sequence[StepRequest]) -> None:
        """See `Store`."""
        del rows
        for one in requests:
            self._requests[one.request_id].history = one.length
        self._open = False
        self._let_go()

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
        return current_stream(self._config.device)

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        for request_id in leaving:
            self.free(request_id)

    def _seated(self, row: int) -> _Request:
        request_id = self._seats[row]
        if request_id is None:
            raise InvalidArgument(f"[ResidentStore] row {row} must be a seated one")
        return self._requests[request_id]

    def _note(self, request: _Request) -> None:
        """Its pages may be others than the tables say."""
        if request.row is not None:
            self._dirty.add(request.row)
