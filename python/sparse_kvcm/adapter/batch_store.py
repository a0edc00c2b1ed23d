"""Requests of a `KvCacheManager`, in the rows of one Batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparse_kvcm._core import (
    Batch,
    InvalidState,
    KvCache,
    KvCacheManager,
    KvCacheState,
    OutOfPages,
    PageRange,
    ResizeResult,
    StepErrors,
)
from sparse_kvcm.adapter.store import check_new, is_away, no_room, no_row
from sparse_kvcm.adapter.streams import current_stream
from sparse_kvcm.ops import ResolveOutputs

if TYPE_CHECKING:
    import torch


class StepFaultError(RuntimeError):
    """The device reported faults of a step that has ended. The next step goes on.

    Attributes
    ----------
    errors : StepErrors
    """

    def __init__(self, errors: StepErrors) -> None:
        super().__init__(f"[prepare_step] the device reported after the last step: {errors}")
        self.errors = errors


@dataclass(eq=False)
class _Request:
    cache: KvCache
    max_tokens: int  # a need counts whole units
    is_lent: bool = False  # a transfer writes to its pages

    @property
    def is_suspended(self) -> bool:
        return self.cache.state == KvCacheState.SUSPENDED


class BatchStore:
    """A `Store` on `KvCacheManager`, whose Batch it owns; see it for the calls.

    With selection groups history is on the host, and steps only decode.

    Parameters
    ----------
    manager : KvCacheManager
    batch : Batch
        Of the manager, without requests.
    max_tokens : int
        Most tokens of one request.
    """

    def __init__(self, manager: KvCacheManager, batch: Batch, max_tokens: int) -> None:
        from torch.utils.dlpack import from_dlpack

        self.manager = manager
        self.batch = batch
        self.storage = manager.storage
        self._max_tokens = max_tokens
        self._device = manager.config.device
        self._tables = from_dlpack(batch.page_tables)
        self._written: set[int] = set()  # rows of tables that no step that ended has shown
        self._requests: dict[int, _Request] = {}

    @property
    def decodes_only(self) -> bool:
        """See `Store`: a prompt's units would have to be in the arena."""
        return self.manager.num_groups > 0

    # --- requests ---

    def add(self, request_id: int, max_tokens: int) -> None:
        """See `Store`."""
        check_new(self, request_id, max_tokens, self._max_tokens)
        self._requests[request_id] = self._make("add_request", max_tokens)

    def take(self, request_id: int, capacity: int, history: int) -> None:
        """See `Store`."""
        one = self._own("import_history", request_id)
        if one.is_suspended:
            raise is_away("import_history", request_id)
        if capacity > one.max_tokens or not one.cache.resize(capacity, history, self._stream):
            raise no_room(request_id, capacity, one.max_tokens)

    def import_units(self, request_id: int, units: Mapping[int, np.ndarray]) -> None:
        """Append units to its history on the host, by member layer. Between two `take`."""
        self._requests[request_id].cache.import_history(dict(units), self._stream)

    def give_back(self, request_id: int) -> None:
        """See `Store`."""
        cache = self._requests[request_id].cache
        cache.resize(cache.history_length, cache.history_length, self._stream)

    def renew(self, request_id: int) -> None:
        """See `Store`."""
        one = self._requests[request_id]
        one.cache.close()
        self._requests[request_id] = self._make("import_history", one.max_tokens)

    def max_tokens(self, request_id: int) -> int:
        """See `Store`."""
        return self._requests[request_id].max_tokens

    def free(self, request_id: int) -> None:
        """See `Store`."""
        self._own("free_request", request_id).cache.close()
        del self._requests[request_id]

    def suspend(self, request_id: int) -> None:
        """See `Store`. Its lease and GPU pages go; all that it has is on the host then."""
        self._own("suspend_request", request_id).cache.suspend(self._stream)

    def resume(self, request_id: int) -> None:
        """See `Store`. It gets a lease and GPU pages again."""
        self._activate("resume_request", self._requests[request_id])

    def lend(self, request_id: int) -> None:
        """Its pages are a transfer's until `regain`: nothing that moves or frees them is done."""
        self._requests[request_id].is_lent = True

    def regain(self, request_id: int) -> None:
        """Nobody but the manager writes to its pages any more."""
        self._requests[request_id].is_lent = False

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it."""
        return self._requests[request_id].cache

    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """See `Store`."""
        return np.asarray(self._requests[request_id].cache.get_base_page_indices(layer_group))

    # --- steps ---

    @property
    def max_rows(self) -> int:
        """See `Store`."""
        return self.batch.max_rows

    def abort_open_step(self) -> None:
        """See `Store`."""
        if self.batch.step_open:
            self.batch.abort_step(self._stream)

    def frontier(self, request_id: int) -> int | None:
        """See `Store`."""
        one = self._requests.get(request_id)
        return None if one is None else one.cache.history_length

    def row_of(self, request_id: int) -> int | None:
        """See `Store`."""
        return self._requests[request_id].cache.row

    def seat(self, request_id: int) -> int:
        """See `Store`."""
        one = self._own("prepare_step", request_id)
        if one.is_suspended:
            raise is_away("prepare_step", request_id)
        try:
            return self.batch.add(one.cache)
        except InvalidState as error:
            seated = sum(other.cache.row is not None for other in self._requests.values())
            if one.cache.row is None and seated == self.max_rows:
                raise no_row(request_id, seated) from error
            raise

    def unseat(self, request_id: int) -> None:
        """See `Store`."""
        cache = self._requests[request_id].cache
        if cache.row is not None:
            self.batch.remove(cache)

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `Store`."""
        seated = {one.cache.row: one for one in self._requests.values()}
        over = {
            row: f"at most {seated[row].max_tokens} tokens"
            for row, length in lengths.items()
            if length > seated[row].max_tokens
        }
        if over:
            return over
        results = self.batch.resize_tokens(dict(lengths), self._stream)
        refused = {row: why.name for row, why in results.items() if why != ResizeResult.OK}
        if refused:
            before = {row: seated[row].cache.history_length for row in lengths}
            self.batch.resize_tokens(before, self._stream)
        return refused

    def publish(self) -> Iterable[int]:
        """See `Store`."""
        self.batch.publish(self._stream)
        self._written.update(self.batch.table_rows)
        try:
            self.batch.wait_ready(self._stream)
        except BaseException:
            self.batch.abort_step(self._stream)
            raise
        return self._written

    def select(self, group: int, rows: torch.Tensor, selection: torch.Tensor) -> ResolveOutputs:
        """Resolve a selection group's selection in the open step, and fetch what the arena lacks.

        Parameters
        ----------
        group : int
        rows : torch.Tensor, int32, shape (b,)
            Contiguous; -1 is padding.
        selection : torch.Tensor, int32, shape (b, k)
        """
        out = self.batch.resolve(group, rows, selection, stream=self._stream)
        self.batch.fetch(group, rows, out, stream=self._stream)
        return out

    def commit(self, rows: Sequence[int]) -> None:
        """See `Store`."""
        self.batch.record_read(rows, self._stream)
        self._written.clear()

    def base_tables(self, layer_group: int) -> torch.Tensor:
        """See `Store`."""
        return self._tables[layer_group]

    def scratch(self, request_id: int, layer_group: int) -> tuple[PageRange, np.ndarray]:
        """See `Store`. A `KvCache` has none."""
        del request_id, layer_group
        return PageRange(0, 0), np.zeros(0, np.int32)

    def check_late_errors(self) -> None:
        """See `Store`."""
        errors = self.batch.take_errors()
        if errors.rows or errors.batch:
            raise StepFaultError(errors)

    @property
    def leased_slots(self) -> int:
        """Slots of all leases, in each member layer."""
        leases = [one.cache.lease for one in self._requests.values()]
        return sum(one.cached_slots + one.window_slots for one in leases if one is not None)

    # --- parts ---

    @property
    def _stream(self) -> int:
        return current_stream(self._device)

    def _make(self, function: str, max_tokens: int) -> _Request:
        need = math.ceil(max_tokens / self.manager.config.tokens_per_unit)
        made = _Request(self.manager.create_kv_cache(need), max_tokens)
        self._activate(function, made)
        return made

    def _activate(self, function: str, request: _Request) -> None:
        if request.cache.resume(self._stream):
            return
        pools = [one.slots.free for one in self.manager.pool_group_use() if one.level == 0]
        lacks, has = "pages", f"{', '.join(map(str, pools))} pages free in the GPU's pool groups"
        if self.decodes_only:
            room = self.manager.occupancy()
            lacks = "lease or pages"
            has += (
                f", {room.free_leases} leases, largest run of free slots "
                f"{room.largest_free_arena_run}"
            )
        raise OutOfPages(
            f"[{function}] no {lacks} for a request of {request.max_tokens} tokens: {has}; "
            "suspend or free a request and try again"
        )

    def _own(self, function: str, request_id: int) -> _Request:
        """A request whose pages are not lent."""
        one = self._requests[request_id]
        if one.is_lent:
            raise InvalidState(
                f"[{function}] request {request_id} is receiving: a peer writes to its pages; "
                "cancel it at its Receiver, which frees it when nobody does any more"
            )
        return one
