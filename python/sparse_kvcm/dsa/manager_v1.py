"""Version 1: everything on the GPU, in the plainest way. The baseline of version 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparse_kvcm._core import (
    InvalidArgument,
    InvalidState,
    OutOfPages,
    RequestPages,
    Storage,
)
from sparse_kvcm.dsa.buffers import index_pool
from sparse_kvcm.dsa.choice import ManagerFeatures, refuse_in_v1
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.latents import ResidentLatents
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.dsa.step_tensors import DsaStep, StepTensors
from sparse_kvcm.dsa.streams import current_stream

if TYPE_CHECKING:
    import torch


@dataclass
class _Request:
    pages: RequestPages
    max_tokens: int
    history: int = 0
    row: int | None = None


class DSACacheManager(DsaManager):
    """A resident DSA cache on `Storage`: a page table per request, and prompts in steps too.

    Parameters
    ----------
    config : DsaCacheConfig
        Without `offload` and `cold_quota`.
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    InvalidArgument, NotImplementedError
        For what it does not do, see `sparse_kvcm.dsa.choice`.
    """

    _decode_only = False

    def __init__(self, config: DsaCacheConfig, features: ManagerFeatures | None = None) -> None:
        import torch

        refuse_in_v1(ManagerFeatures(offloads=config.offload is not None))
        if features is not None:
            refuse_in_v1(features)
        self.config = config
        if config.cold_quota:
            raise InvalidArgument(
                "[DSACacheManager] cold_quota must be 0: pages of suspended requests stay on the "
                f"GPU, got {config.cold_quota}; use_kv_cache_manager_v2=True gives one that has it"
            )
        self.storage = Storage(config.storage_config())
        self._latents: ResidentLatents = ResidentLatents(self.storage, config)
        self.index_keys = index_pool(self.storage, config)
        self._requests: dict[int, _Request] = {}
        self._seats: list[int | None] = [None] * config.max_batch_size
        self._dirty: set[int] = set()
        self._leaving: list[int] = []
        self._host_table = np.full((config.max_batch_size, config.max_pages), -1, np.int32)
        self._table = torch.from_numpy(self._host_table)
        pools = [*self._latents.pools, self.index_keys]
        self._tensors = StepTensors(pools, config.max_batch_size, config.max_pages, config.device)

    # --- requests ---

    def add_request(self, request_id: int, max_tokens: int) -> None:
        """See `DsaManager`."""
        if request_id in self._requests:
            raise InvalidArgument(f"[add_request] request_id {request_id} must be a new one")
        if not 1 <= max_tokens <= self.config.max_seq_len:
            raise InvalidArgument(
                f"[add_request] max_tokens must be in [1, {self.config.max_seq_len}], "
                f"got {max_tokens}"
            )
        pages = self.storage.create_request_pages(max_tokens)
        self._requests[request_id] = _Request(pages, max_tokens)

    def import_history(
        self,
        request_id: int,
        latents: Mapping[int, torch.Tensor],
        index_keys: Mapping[int, torch.Tensor],
    ) -> None:
        """See `DsaManager`."""
        import torch

        request = self._known("import_history", request_id)
        if self._step is not None:
            raise InvalidState("[import_history] a step is open; end or abort it first")
        n = self._check_import(latents, index_keys)
        length = request.history + n
        stream = current_stream(self.config.device)
        if length > request.max_tokens or not request.pages.resize(length, request.history, stream):
            raise OutOfPages(
                f"[import_history] no room for {length} tokens of request {request_id}, at most "
                f"{request.max_tokens}; free a request and try again"
            )
        group = self.index_keys.layer_group
        slots = torch.from_numpy(request.pages.get_base_page_indices(group))
        slots = slots.to(self.config.device)
        self._import_index_keys(slots, request.history, index_keys)
        for layer, rows in latents.items():
            self._latents.write(layer, slots, request.history, self._encode(rows))
        self._advance(request, length)
        self._note(request)

    def free_request(self, request_id: int) -> None:
        """See `DsaManager`."""
        request = self._known("free_request", request_id)
        if self._step is not None:
            self._leaving.append(request_id)  # the step still reads its pages
            return
        request.pages.close(current_stream(self.config.device))
        self.unseat(request_id)
        del self._requests[request_id]

    def suspend_request(self, request_id: int) -> None:
        """See `DsaManager`. Pages stay on the GPU."""
        self._known("suspend_request", request_id)
        if self._step is not None:
            raise InvalidState("[suspend_request] a step is open; end or abort it first")
        self.unseat(request_id)

    def resume_request(self, request_id: int) -> None:
        """See `DsaManager`."""
        self._known("resume_request", request_id)

    # --- one step ---

    def get_unique_primary_pool(self) -> torch.Tensor:
        """All latents, uint8 ``[slots, layers, 1, page_bytes]``, without a copy."""
        return self._latents.pools[0].slots_view()

    # --- StepBackend ---

    def abort_open_step(self) -> None:
        """See `DsaManager`."""
        self._step = None
        for request in self._requests.values():
            if request.pages.capacity != request.history:
                request.pages.drop_step(current_stream(self.config.device))
                self._note(request)
        self._let_go()

    def frontier(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        request = self._requests.get(request_id)
        return None if request is None else request.history

    def row_of(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        return self._requests[request_id].row

    def seat(self, request_id: int) -> int:
        """See `DsaManager`."""
        if None not in self._seats:
            raise InvalidState(f"[prepare_step] no row is free for request {request_id}")
        row = self._seats.index(None)
        self._seats[row] = request_id
        self._requests[request_id].row = row
        self._note(self._requests[request_id])
        return row

    def unseat(self, request_id: int) -> None:
        """See `DsaManager`."""
        request = self._requests[request_id]
        if request.row is not None:
            self._seats[request.row] = None
            self._dirty.add(request.row)
            request.row = None

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `DsaManager`."""
        stream = current_stream(self.config.device)
        refused: dict[int, str] = {}
        for row, length in lengths.items():
            request = self._seated(row)
            if length > request.max_tokens:
                refused[row] = f"at most {request.max_tokens} tokens"
            elif not request.pages.resize(length, request.history, stream):
                refused[row] = "OUT_OF_PAGES"
            self._dirty.add(row)
        for row in lengths if refused else ():
            self._seated(row).pages.drop_step(stream)
            self._note(self._seated(row))
        return refused

    def publish(self) -> Iterable[int]:
        """See `DsaManager`."""
        written = set()
        for row in self._dirty:
            table = np.full(self.config.max_pages, -1, np.int32)
            if self._seats[row] is not None:
                pages = self._seated(row).pages
                pages.copy_base_page_indices(self.index_keys.layer_group, table)
            if not np.array_equal(table, self._host_table[row]):
                self._host_table[row] = table
                written.add(row)
        self._dirty.clear()
        return written

    def _commit(self, step: DsaStep) -> None:
        for one in step.prepared.requests:
            self._advance(self._requests[one.request_id], one.length)
        self._step = None
        self._let_go()

    def _base_table(self, layer_group: int) -> torch.Tensor:
        del layer_group  # all roles have one
        return self._table

    def _check_late_errors(self) -> None:
        """Nothing is reported late."""

    # --- parts ---

    def _advance(self, request: _Request, length: int) -> None:
        """Tokens up to its capacity are computed: a step that is dropped later leaves them."""
        request.pages.resize(length, length, current_stream(self.config.device))
        request.history = length

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        for request_id in leaving:
            self.free_request(request_id)

    def _known(self, function: str, request_id: int) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise InvalidArgument(
                f"[{function}] request_id must be one of the manager's, got {request_id}"
            )
        return request

    def _seated(self, row: int) -> _Request:
        request_id = self._seats[row]
        if request_id is None:
            raise InvalidArgument(f"[DSACacheManager] row {row} must be a seated one")
        return self._requests[request_id]

    def _note(self, request: _Request) -> None:
        """Its pages may be others than the device's tables say."""
        if request.row is not None:
            self._dirty.add(request.row)
