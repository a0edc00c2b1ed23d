"""An offloading cache manager as a receiver needs it: room, pages, repacking, and the end.

What a request takes, it takes at once, before a byte moves: host pages for its history, a lease,
pages on the GPU. It is the manager's from then on, receiving; nobody can decode it before `commit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparse_kvcm._core import InvalidArgument, KvCache, OutOfPages
from sparse_kvcm.adapter.batch_store import BatchStore
from sparse_kvcm.adapter.streams import current_stream
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager
from sparse_kvcm.dsa import DSACacheManagerV2
from sparse_kvcm.transfer.page_table import PageTable
from sparse_kvcm.transfer.staging import StagingRing
from sparse_kvcm.transfer.tables import Buffer, dsa_buffers, in_pages_of, make_tables, v4_buffers
from sparse_kvcm.transfer.wire import PageList

Job = Callable[[], None]


class NoRoomError(OutOfPages):
    """Something lacks now; later there may be enough.

    Attributes
    ----------
    limit : str
        What: "host pages", "arena lease", "device pages", "staging", "transfers in flight".
    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class _Manager(Protocol):
    def add_request(self, request_id: int, max_tokens: int) -> None: ...
    def free_request(self, request_id: int) -> None: ...
    def kv_cache(self, request_id: int) -> KvCache: ...
    def frontier(self, request_id: int) -> int | None: ...


@dataclass
class _Admitted:
    tokens: int
    units: int
    ready: Any  # torch.cuda.Event, or None


class OffloadTarget:
    """Receives into a manager with `offload`.

    Parameters
    ----------
    manager : DSACacheManagerV2 or DeepseekV4CacheManager
        One thread at a time calls it, the receiver's calls included.
    staging_slots : int
        Pages of history, of all layers together, that can be on their way at a time.
    staging_tokens : int, optional
        Tokens of such a page: best those of the prefill's pages, which then arrive whole. The
        manager's by default.

    Raises
    ------
    InvalidArgument
        For a manager without `offload`, or `staging_tokens` that are no units.
    """

    def __init__(
        self,
        manager: DSACacheManagerV2 | DeepseekV4CacheManager,
        staging_slots: int,
        staging_tokens: int | None = None,
    ) -> None:
        if manager.config.offload is None:
            raise InvalidArgument("[OffloadTarget] manager must have offload, got a resident one")
        self._manager: _Manager = manager
        self._device = manager.config.device
        assert isinstance(manager.store, BatchStore)  # with offload
        self._store = manager.store
        self._engine, buffers = self._store.manager, _buffers(manager)
        self._per_unit = self._engine.config.tokens_per_unit
        self._page_tokens = staging_tokens or self._engine.config.tokens_per_block
        if self._page_tokens < 1 or self._page_tokens % self._per_unit:
            raise InvalidArgument(
                f"[OffloadTarget] staging_tokens must be a multiple of {self._per_unit}, the "
                f"tokens of a unit, got {staging_tokens}"
            )
        staged = [in_pages_of(one, self._page_tokens) for one in buffers if one.group >= 0]
        self.staging = StagingRing(staged, staging_slots, is_pinned=self._device != "cpu")
        self._tables = make_tables(
            self._engine.storage, buffers, (self.staging.pool, self.staging.placed)
        )
        self._offsets = [self.staging.offsets(g) for g in range(len(self._engine.config.groups))]
        self._units_per_page = self._page_tokens // self._per_unit
        self._admitted: dict[int, _Admitted] = {}

    @property
    def table(self) -> PageTable:
        """What peers write to."""
        return self._tables.table

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of staging."""
        return self._page_tokens

    def num_pages(self, tokens: int) -> int:
        """Pages of staging that so many tokens fill; 0 if they have no whole unit."""
        return math.ceil(tokens // self._per_unit / self._units_per_page)

    # --- a request ---

    def admit(self, key: int, tokens: int, max_tokens: int) -> None:
        """Take all that `tokens` tokens of a request need.

        Raises
        ------
        NoRoomError
            Naming what lacks; nothing is taken.
        InvalidArgument
            If it could never be had, or for a key in use.
        """
        pages, engine = self._host_pages(tokens), self._engine
        if not 1 <= tokens <= max_tokens:
            raise InvalidArgument(
                f"[admit] prompt_tokens must be in [1, max_tokens {max_tokens}], got {tokens}"
            )
        if pages > engine.config.host_pages:
            raise InvalidArgument(
                f"[admit] prompt_tokens must be some that {engine.config.host_pages} host pages "
                f"hold, got {tokens}, which take {pages}"
            )
        self._check_host(pages)
        try:
            self._manager.add_request(key, max_tokens)
        except OutOfPages as error:
            raise NoRoomError(self._lacks(max_tokens), str(error)) from error
        try:
            self._reserve(key, tokens)
        except BaseException:
            self._manager.free_request(key)
            raise
        self._store.lend(key)

    def is_ready(self, key: int) -> bool:
        """Whether whoever used its pages before is done with them: then they may be written."""
        ready = self._admitted[key].ready
        return ready is None or bool(ready.query())

    def device_pages(self, key: int) -> list[PageList]:
        """Its pages in pools: index keys, windows, states."""
        cache = self._manager.kv_cache(key)
        return [
            PageList.of(group, 0, cache.get_base_page_indices(storage_group))
            for storage_group, group in self._tables.group_of.items()
        ]

    def staged_pages(self, first_page: int, slots: Sequence[int]) -> PageList:
        """Slots of staging in which pages of its history are to arrive."""
        assert self._tables.staging is not None
        return PageList.of(self._tables.staging, first_page, slots)

    def repack_jobs(
        self, key: int, first_page: int, slots: Sequence[int], num_jobs: int
    ) -> list[Job]:
        """Calls that together repack what has arrived. They may run on any threads."""
        cache, units = self._manager.kv_cache(key), self._admitted[key].units
        runs = [
            (first_page + place, slots[place], count) for place, count in _runs(slots)
        ]  # pages that lie side by side in staging
        groups = range(len(self._offsets))
        shares = [groups[i::num_jobs] for i in range(min(num_jobs, len(groups)))]
        return [self._job(cache, units, runs, share) for share in shares]

    def commit(self, key: int) -> None:
        """All of it is there: it can be decoded."""
        one = self._admitted.pop(key)
        if one.units:
            self._manager.kv_cache(key).commit_history(current_stream(self._device))
        self._store.regain(key)

    def drop(self, key: int) -> None:
        """Give back all that it took. Nobody writes to its pages any more."""
        self._admitted.pop(key, None)
        if self._manager.frontier(key) is not None:
            self._store.regain(key)
            self._manager.free_request(key)

    # --- parts ---

    def _job(
        self,
        cache: KvCache,
        units: int,
        runs: Sequence[tuple[int, int, int]],
        groups: Sequence[int],
    ) -> Job:
        per_page = self._units_per_page

        def repack() -> None:
            for group in groups:
                for page, slot, count in runs:
                    first = page * per_page
                    cache.write_history(
                        group,
                        first,
                        min(count * per_page, units - first),
                        self.staging.slots[slot : slot + count],
                        self._offsets[group],
                        per_page,
                    )

        return repack

    def _reserve(self, key: int, tokens: int) -> None:
        cache, stream = self._manager.kv_cache(key), current_stream(self._device)
        if not cache.resize(tokens, tokens, stream):
            raise NoRoomError("device pages", f"[admit] no pages on the GPU for {tokens} tokens")
        units = tokens // self._per_unit
        if units and not cache.reserve_history(units):
            self._check_host(self._host_pages(tokens))
            raise NoRoomError("host pages", f"[admit] no host pages for {tokens} tokens")
        self._admitted[key] = _Admitted(tokens, units, _record(self._device))

    def _host_pages(self, tokens: int) -> int:
        """Pages that their history takes on the host."""
        per_page = self._engine.config.tokens_per_block // self._per_unit
        return math.ceil(tokens // self._per_unit / per_page)

    def _check_host(self, pages: int) -> None:
        free = self._engine.occupancy().free_host_pages
        if pages > free:
            raise NoRoomError(
                "host pages", f"[admit] the history needs {pages} host pages, {free} are free"
            )

    def _lacks(self, max_tokens: int) -> str:
        """Why a request found no room."""
        config, room = self._engine.config, self._engine.occupancy()
        lease = config.cached_slots + config.window_slots
        need = math.ceil(max_tokens / self._per_unit)
        if need <= lease:  # all window
            per_page = config.tokens_per_block // self._per_unit
            lease = math.ceil(need / per_page) * per_page
        fits = room.free_leases > 0 and lease <= room.largest_free_arena_run
        return "device pages" if fits else "arena lease"


def _buffers(manager: DSACacheManagerV2 | DeepseekV4CacheManager) -> list[Buffer]:
    if isinstance(manager, DSACacheManagerV2):
        return dsa_buffers(manager.config)
    return v4_buffers(manager.config)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and length of each run of slots that lie side by side."""
    runs: list[tuple[int, int]] = []
    for place, slot in enumerate(slots):
        if runs and slot == slots[place - 1] + 1:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


def _record(device: str) -> Any:
    """An event behind all that the current stream has; None where there is nothing to wait for."""
    if device == "cpu":
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
