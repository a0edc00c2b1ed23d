"""Entries of ratio 4 on the host, fetched as they are selected; everything else on the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparse_kvcm._core import (
    InvalidState,
    KvCache,
    KvCacheManager,
    OutOfPages,
    PageRange,
    ResizeResult,
)
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.store import Store, check_new
from sparse_kvcm.dsa.config import OffloadSizes
from sparse_kvcm.dsa.manager_v2 import StepFaultError
from sparse_kvcm.dsa.streams import current_stream
from sparse_kvcm.step import StepRequest

if TYPE_CHECKING:
    import torch


class OffloadStore(Store):
    """A `Store` on `KvCacheManager`, whose Batch it owns; see it for the calls.

    Attributes
    ----------
    manager : KvCacheManager
    batch : Batch
    arenas : dict of int to torch.Tensor, uint8, shape (pages, page_bytes)
        By member layer; the last page may be written freely.
    """

    decodes_only = True

    def __init__(self, config: DeepseekV4CacheConfig, sizes: OffloadSizes) -> None:
        from torch.utils.dlpack import from_dlpack

        self._config = config
        self.manager = KvCacheManager(config.offload_manager(sizes))
        self.storage = self.manager.storage
        # Rows of padding, and those whose entry is not whole, write somewhere too: no branch.
        self.batch = self.manager.create_batch(
            config.max_batch_size,
            config.units(config.max_seq_len),
            no_write_slot=self.manager.trash_slot,
        )
        self.arenas = {
            layer: from_dlpack(self.manager.arena(layer)) for layer in self.manager.layers
        }
        self._tables = from_dlpack(self.batch.page_tables)
        self._written: set[int] = set()  # rows of tables that no step has been told of
        self._caches: dict[int, KvCache] = {}
        self._max_tokens: dict[int, int] = {}  # a need counts whole entries

    # --- requests ---

    def add(self, request_id: int, max_tokens: int) -> None:
        """See `Store`."""
        check_new(self, request_id, max_tokens, self._config.max_seq_len)
        self._caches[request_id] = self._make("add_request", self._config.units(max_tokens))
        self._max_tokens[request_id] = max_tokens

    def fill(self, request_id: int, tokens: int, units: Mapping[int, np.ndarray] | None) -> None:
        """See `Store`. History cannot go back: where units do not fit, the request is made anew."""
        cache = self._caches[request_id]
        most = self._max_tokens[request_id]
        if tokens > most or not cache.resize(tokens, tokens, self._stream):
            raise OutOfPages(
                f"[import_history] no room for {tokens} tokens of request {request_id}, at most "
                f"{most}; free or suspend a request and try again"
            )
        try:
            if units:
                cache.import_history(dict(units), self._stream)
        except BaseException:
            cache.close()
            self._caches[request_id] = self._make("import_history", cache.need)
            raise

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it."""
        return self._caches[request_id]

    def free(self, request_id: int) -> None:
        """See `Store`."""
        del self._max_tokens[request_id]
        self._caches.pop(request_id).close()

    def suspend(self, request_id: int) -> None:
        """See `Store`. Its lease and GPU pages go; all that it has is on the host then."""
        self._caches[request_id].suspend(self._stream)

    def resume(self, request_id: int) -> None:
        """See `Store`. It gets a lease and GPU pages again."""
        self._activate("resume_request", self._caches[request_id])

    def page_indices(self, request_id: int, layer_group: int) -> np.ndarray:
        """See `Store`."""
        return np.asarray(self._caches[request_id].get_base_page_indices(layer_group))

    # --- steps ---

    @property
    def max_rows(self) -> int:
        """See `Store`."""
        return self._config.max_batch_size

    def abort_open_step(self) -> None:
        """See `Store`."""
        if self.batch.step_open:
            self.batch.abort_step(self._stream)

    def frontier(self, request_id: int) -> int | None:
        """See `Store`."""
        cache = self._caches.get(request_id)
        return None if cache is None else cache.history_length

    def row_of(self, request_id: int) -> int | None:
        """See `Store`."""
        return self._caches[request_id].row

    def seat(self, request_id: int) -> int:
        """See `Store`."""
        return self.batch.add(self._caches[request_id])

    def unseat(self, request_id: int) -> None:
        """See `Store`."""
        cache = self._caches[request_id]
        if cache.row is not None:
            self.batch.remove(cache)

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `Store`."""
        before = {c.row: c.history_length for c in self._caches.values() if c.row in lengths}
        most = {c.row: self._max_tokens[i] for i, c in self._caches.items() if c.row is not None}
        over = {row: f"at most {most[row]} tokens" for row, n in lengths.items() if n > most[row]}
        if over:
            return over
        results = self.batch.resize_tokens(dict(lengths), self._stream)
        refused = {row: why.name for row, why in results.items() if why != ResizeResult.OK}
        if refused:
            self.batch.resize_tokens({r: n for r, n in before.items() if r is not None})
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
        written, self._written = self._written, set()
        return written

    def commit(self, rows: Sequence[int], requests: Sequence[StepRequest]) -> None:
        """See `Store`."""
        self.batch.record_read(rows[: len(requests)], self._stream)

    def base_tables(self, layer_group: int) -> torch.Tensor:
        """See `Store`."""
        return self._tables[layer_group]

    def scratch(self, request_id: int, layer_group: int) -> tuple[PageRange, np.ndarray]:
        """See `Store`. A step of one token has none."""
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
        leases = [cache.lease for cache in self._caches.values()]
        return sum(one.cached_slots + one.window_slots for one in leases if one is not None)

    # --- parts ---

    @property
    def _stream(self) -> int:
        return current_stream(self._config.device)

    def _make(self, function: str, need: int) -> KvCache:
        cache = self.manager.create_kv_cache(need)
        self._activate(function, cache)
        return cache

    def _activate(self, function: str, cache: KvCache) -> None:
        if cache.resume(self._stream):
            return
        room = self.manager.occupancy()
        raise OutOfPages(
            f"[{function}] no lease or pages for a request of {cache.need} entries: "
            f"{room.free_leases} leases free, largest run of free slots "
            f"{room.largest_free_arena_run}; suspend or free a request and try again"
        )


def check_unseated(store: Store, request_id: int) -> None:
    """Refuse to import into a request that decodes.

    Raises
    ------
    InvalidState
        If it has a row or tokens.
    """
    if store.row_of(request_id) is not None or store.frontier(request_id):
        raise InvalidState(
            f"[import_history] request {request_id} must be empty: windows and compressor states "
            "come whole, so a history is imported once"
        )
