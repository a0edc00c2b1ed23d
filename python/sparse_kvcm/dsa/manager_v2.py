"""Version 2, on the engine's manager: everything on the GPU, or latents on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import (
    InvalidArgument,
    InvalidState,
    KvCache,
    KvCacheManager,
    OutOfPages,
    ResizeResult,
    StepErrors,
)
from sparse_kvcm.dsa.buffers import index_pool
from sparse_kvcm.dsa.choice import ManagerFeatures, refuse_in_v2
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.latents import OffloadedLatents, ResidentLatents
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.dsa.step_tensors import DsaStep, StepTensors
from sparse_kvcm.dsa.streams import current_stream
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


class DSACacheManagerV2(DsaManager):
    """A DSA cache on `KvCacheManager`, whose Batch it owns.

    Parameters
    ----------
    config : DsaCacheConfig
        With `offload`, latents are on the host, fetched as they are selected, and steps only
        decode. Without, everything is on the GPU, and prompts may be computed in steps too.
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    NotImplementedError
        For what no manager of version 2 does, see `sparse_kvcm.dsa.choice`.
    """

    def __init__(self, config: DsaCacheConfig, features: ManagerFeatures | None = None) -> None:
        from torch.utils.dlpack import from_dlpack

        refuse_in_v2("DSACacheManagerV2", features or ManagerFeatures())
        self.config = config
        self._decode_only = config.offload is not None  # prompts would need latents on the GPU
        self.manager = KvCacheManager(config.manager_config())
        self.batch = self.manager.create_batch(config.max_batch_size, config.max_seq_len)
        self.index_keys = index_pool(self.manager.storage, config)
        self._latents: ResidentLatents | OffloadedLatents = (
            ResidentLatents(self.manager.storage, config)
            if config.offload is None
            else OffloadedLatents(self.manager, self.batch, config)
        )
        self._tables = from_dlpack(self.batch.page_tables)
        self._written: set[int] = set()  # rows of tables that no step has been told of
        self._caches: dict[int, KvCache] = {}
        pools = [*self._latents.pools, self.index_keys]
        self._tensors = StepTensors(pools, config.max_batch_size, config.max_pages, config.device)

    # --- requests ---

    def add_request(self, request_id: int, max_tokens: int) -> None:
        """See `DsaManager`."""
        if request_id in self._caches:
            raise InvalidArgument(f"[add_request] request_id {request_id} must be a new one")
        if not 1 <= max_tokens <= self.config.max_seq_len:
            raise InvalidArgument(
                f"[add_request] max_tokens must be in [1, {self.config.max_seq_len}], "
                f"got {max_tokens}"
            )
        cache = self.manager.create_kv_cache(max_tokens)
        self._activate("add_request", cache)
        self._caches[request_id] = cache

    def import_history(
        self,
        request_id: int,
        latents: Mapping[int, torch.Tensor],
        index_keys: Mapping[int, torch.Tensor],
    ) -> None:
        """See `DsaManager`."""
        import torch

        cache = self._known("import_history", request_id)
        if cache.row is not None:
            raise InvalidState(
                f"[import_history] request {request_id} has decoded; its prompt is complete"
            )
        n = self._check_import(latents, index_keys)
        history, length, stream = cache.history_length, cache.history_length + n, self._stream
        if length > cache.need or not cache.resize(length, history, stream):
            raise OutOfPages(
                f"[import_history] no room for {length} tokens of request {request_id}, at most "
                f"{cache.need}; free or suspend a request and try again"
            )
        try:
            slots = torch.from_numpy(cache.get_base_page_indices(self.index_keys.layer_group))
            slots = slots.to(self.config.device)
            self._import_index_keys(slots, history, index_keys)
            self._import_latents(cache, slots, latents)
        except BaseException:
            cache.resize(history, history, stream)
            raise
        cache.resize(length, length, stream)

    def free_request(self, request_id: int) -> None:
        """See `DsaManager`."""
        self._known("free_request", request_id).close()
        del self._caches[request_id]

    def suspend_request(self, request_id: int) -> None:
        """See `DsaManager`. Its lease and GPU pages go; all that it has is on the host then."""
        self._known("suspend_request", request_id).suspend(self._stream)

    def resume_request(self, request_id: int) -> None:
        """See `DsaManager`. It gets a lease and GPU pages again."""
        self._activate("resume_request", self._known("resume_request", request_id))

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it, for who brings its tokens page by page."""
        return self._known("kv_cache", request_id)

    # --- one step ---

    @property
    def leased_slots(self) -> int:
        """Slots of all leases, in each layer."""
        leases = [cache.lease for cache in self._caches.values()]
        return sum(one.cached_slots + one.window_slots for one in leases if one is not None)

    def resolved(self, layer: int) -> ResolveOutputs:
        """What the last `select` of a layer's group wrote in this step: slots, counts, errors.

        Raises
        ------
        InvalidState
            Before it, and without `offload`, where nothing is resolved.
        """
        if isinstance(self._latents, ResidentLatents):
            raise InvalidState(
                "[DSACacheManagerV2] everything is on the GPU, and nothing is resolved"
            )
        return self._latents.resolved(self.config.geometry.selection_group_of[layer])

    # --- StepBackend ---

    def abort_open_step(self) -> None:
        """See `DsaManager`."""
        self._latents.forget_step()
        self._step = None
        if self.batch.step_open:
            self.batch.abort_step(self._stream)

    def frontier(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        cache = self._caches.get(request_id)
        return None if cache is None else cache.committed_length

    def row_of(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        return self._caches[request_id].row

    def seat(self, request_id: int) -> int:
        """See `DsaManager`."""
        return self.batch.add(self._caches[request_id])

    def unseat(self, request_id: int) -> None:
        """See `DsaManager`."""
        cache = self._caches[request_id]
        if cache.row is not None:
            self.batch.remove(cache)

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `DsaManager`."""
        before = {c.row: c.committed_length for c in self._caches.values() if c.row in lengths}
        results = self.batch.resize_tokens(dict(lengths), self._stream)
        refused = {r: why.name for r, why in results.items() if why != ResizeResult.OK}
        if refused:
            self.batch.resize_tokens({r: n for r, n in before.items() if r is not None})
        return refused

    def publish(self) -> Iterable[int]:
        """See `DsaManager`."""
        self.batch.publish(self._stream)
        self._written.update(self.batch.table_rows)
        try:
            self.batch.wait_ready(self._stream)
        except BaseException:
            self.batch.abort_step(self._stream)
            raise
        written, self._written = self._written, set()
        return written

    def _commit(self, step: DsaStep) -> None:
        rows = step.prepared.rows[: len(step.prepared.requests)]
        self.batch.record_read(rows, self._stream)

    def _base_table(self, layer_group: int) -> torch.Tensor:
        return self._tables[layer_group]

    def _check_late_errors(self) -> None:
        errors = self.batch.take_errors()
        if errors.rows or errors.batch:
            raise StepFaultError(errors)

    # --- parts ---

    @property
    def _stream(self) -> int:
        return current_stream(self.config.device)

    def _activate(self, function: str, cache: KvCache) -> None:
        if cache.resume(self._stream):
            return
        group = self.index_keys.pool_group
        free = self.manager.pool_group_use()[group].slots.free
        lacks, has = "pages", f"{free} pages free"
        if self.config.offload is not None:
            room = self.manager.occupancy()
            lacks = "lease or pages"
            has += (
                f", {room.free_leases} leases, largest run of free slots "
                f"{room.largest_free_arena_run}"
            )
        raise OutOfPages(
            f"[{function}] no {lacks} for a request of {cache.need} tokens: {has}; suspend or free "
            "a request and try again"
        )

    def _known(self, function: str, request_id: int) -> KvCache:
        cache = self._caches.get(request_id)
        if cache is None:
            raise InvalidArgument(
                f"[{function}] request_id must be one of the manager's, got {request_id}"
            )
        return cache

    def _import_latents(
        self, cache: KvCache, slots: torch.Tensor, latents: Mapping[int, torch.Tensor]
    ) -> None:
        """Write them behind its history, given its slots on the GPU."""
        import torch

        store, history = self._latents, cache.history_length
        if isinstance(store, ResidentLatents):
            for layer, rows in latents.items():
                store.write(layer, slots, history, self._encode(rows))
            return
        records = {
            layer: torch.cat(self._encode(rows), 1).cpu().numpy() for layer, rows in latents.items()
        }
        cache.import_history(records, self._stream)
