"""Version 2: latents on the host, fetched as they are selected; index keys on the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import (
    InvalidArgument,
    InvalidState,
    KvCache,
    KvCacheManager,
    KvCacheManagerConfig,
    OutOfPages,
    ResizeResult,
    SelectionGroupConfig,
    StepErrors,
)
from sparse_kvcm.dsa.buffers import index_pool, typed_view
from sparse_kvcm.dsa.choice import ManagerFeatures, refuse_in_v2
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.forward_table import ChangedRows
from sparse_kvcm.dsa.manager import DsaManager, Role
from sparse_kvcm.dsa.slot_mapping import PageGeometry
from sparse_kvcm.dsa.step_tensors import DsaStep, StepTensors
from sparse_kvcm.dsa.streams import current_stream
from sparse_kvcm.ops import ResolveOutputs

if TYPE_CHECKING:
    import torch

    from sparse_kvcm.dsa.scatter import Skip


class StepFaultError(RuntimeError):
    """The device reported faults of a step that has ended. The next step goes on.

    Attributes
    ----------
    errors : StepErrors
    """

    def __init__(self, errors: StepErrors) -> None:
        super().__init__(f"[prepare_step] the device reported after the last step: {errors}")
        self.errors = errors


def manager_config(config: DsaCacheConfig) -> KvCacheManagerConfig:
    """The engine's configuration: latents as selection groups, index keys as dense layers."""
    geometry, sizes = config.geometry, config.offload
    if sizes is None:
        raise InvalidArgument(
            "[DSACacheManagerV2] offload must be set: the engine's manager has no resident form "
            "yet; DSACacheManager (use_kv_cache_manager_v2=False) keeps everything on the GPU"
        )
    window = config.page_tokens if sizes.window_slots is None else sizes.window_slots
    lease = min(config.pages(sizes.cached_slots + window), config.max_pages)
    layout = geometry.unit_layout(config.kv_dtype)
    return KvCacheManagerConfig(
        groups=[SelectionGroupConfig(group, geometry.top_k, layout) for group in geometry.groups],
        cached_slots=sizes.cached_slots,
        window_slots=window,
        arena_pages=sizes.arena_pages or config.max_batch_size * lease,
        host_pages=sizes.host_pages,
        max_leases=config.max_batch_size,
        tokens_per_block=config.page_tokens,
        dense_layers=geometry.dense_layers(config.page_tokens, config.kv_dtype, config.index_dtype),
        gpu_quota=config.gpu_quota,
        cold_quota=sizes.cold_quota,
        max_util_for_resume=config.max_util_for_resume,
        constraints=[config.longest_request],
        device=config.device,
    )


class DSACacheManagerV2(DsaManager):
    """A DSA cache of a worker that decodes only, on `KvCacheManager`, whose Batch it owns.

    Parameters
    ----------
    config : DsaCacheConfig
        With `offload`.
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    NotImplementedError
        For what no manager of version 2 does, see `sparse_kvcm.dsa.choice`.
    """

    _decode_only = True

    def __init__(self, config: DsaCacheConfig, features: ManagerFeatures | None = None) -> None:
        from torch.utils.dlpack import from_dlpack

        refuse_in_v2("DSACacheManagerV2", features or ManagerFeatures())
        self.config = config
        self.manager = KvCacheManager(manager_config(config))
        # Rows of padding write somewhere too, so that what writes latents can be captured.
        self.batch = self.manager.create_batch(
            config.max_batch_size, config.max_seq_len, no_write_slot=self.manager.trash_slot
        )
        self.index_keys = index_pool(self.manager.storage, config)
        self._arenas = {
            layer: from_dlpack(self.manager.arena(layer)) for layer in self.manager.layers
        }
        self._tables = from_dlpack(self.batch.page_tables)
        self._caches: dict[int, KvCache] = {}
        self._selected: dict[int, ResolveOutputs] = {}  # by selection group
        self._changed = ChangedRows()
        self._tensors = StepTensors(
            [self.index_keys], config.max_batch_size, config.max_pages, config.device
        )

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
            self._import_index_keys(slots.to(self.config.device), history, index_keys)
            cache.import_history(
                {
                    layer: torch.cat(self._encode(rows), 1).cpu().numpy()
                    for layer, rows in latents.items()
                },
                stream,
            )
        except BaseException:
            cache.resize(history, history, stream)
            raise
        cache.resize(length, length, stream)

    def free_request(self, request_id: int) -> None:
        """See `DsaManager`."""
        cache = self._known("free_request", request_id)
        self._forget(cache)
        cache.close()
        del self._caches[request_id]

    def suspend_request(self, request_id: int) -> None:
        """See `DsaManager`. Its lease and GPU pages go; all that it has is on the host then."""
        cache = self._known("suspend_request", request_id)
        row = cache.row
        cache.suspend(self._stream)
        if row is not None:
            self._changed.forget(row)

    def resume_request(self, request_id: int) -> None:
        """See `DsaManager`. It gets a lease and GPU pages again."""
        self._activate("resume_request", self._known("resume_request", request_id))

    # --- one step ---

    def select(self, layer: int, selection: torch.Tensor) -> torch.Tensor:
        """See `DsaManager`. Resolves, and fetches what the arena lacks for all member layers."""
        from torch.utils.dlpack import from_dlpack

        step = self._open("select")
        self._check_leader("select", layer)
        group = self.config.geometry.selection_group_of[layer]
        out = self.batch.resolve(group, step.rows, selection, stream=self._stream)
        self.batch.fetch(group, step.rows, out, stream=self._stream)
        self._selected[group] = out
        return from_dlpack(out.slots)

    @property
    def leased_slots(self) -> int:
        """Slots of all leases, in each layer."""
        leases = [cache.lease for cache in self._caches.values()]
        return sum(one.cached_slots + one.window_slots for one in leases if one is not None)

    def resolved(self, layer: int) -> ResolveOutputs:
        """What the last `select` of a layer's group wrote in this step: slots, counts, errors."""
        group = self.config.geometry.selection_group_of[layer]
        if group not in self._selected:
            leader = self.config.geometry.groups[group][0]
            raise InvalidState(
                f"[DSACacheManagerV2] layer {layer} needs the selection of layer {leader} first; "
                "call select"
            )
        return self._selected[group]

    def get_buffers(self, layer: int, role: Role = "KEY") -> torch.Tensor:
        """See `DsaManager`. Pages of the arena, the last of which may be written freely.

        Where latents have several regions (nvfp4) the last dimension is all bytes of a token; in a
        page, each region of all tokens lies before the next.
        """
        if role != "KEY":
            raise InvalidArgument(
                f"[get_buffers] role must be KEY, whose pages have all regions, got {role}"
            )
        return typed_view(self._arenas[layer], self.config, role)

    # --- StepBackend ---

    def abort_open_step(self) -> None:
        """See `DsaManager`."""
        self._selected.clear()
        step, self._step = self._step, None
        if self.batch.step_open:
            self.batch.abort_step(self._stream)
        for row in step.prepared.rows if step is not None else ():
            self._changed.forget(row)

    def frontier(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        cache = self._caches.get(request_id)
        return None if cache is None else cache.committed_length

    def row_of(self, request_id: int) -> int | None:
        """See `DsaManager`."""
        return self._caches[request_id].row

    def seat(self, request_id: int) -> int:
        """See `DsaManager`."""
        row = self.batch.add(self._caches[request_id])
        self._changed.forget(row)
        return row

    def unseat(self, request_id: int) -> None:
        """See `DsaManager`."""
        cache = self._caches[request_id]
        if cache.row is not None:
            self._forget(cache)
            self.batch.remove(cache)

    def grow(self, lengths: Mapping[int, int]) -> Mapping[int, str]:
        """See `DsaManager`."""
        before = {c.row: c.committed_length for c in self._caches.values() if c.row in lengths}
        results = self.batch.resize_tokens(dict(lengths), self._stream)
        refused = {r: why.name for r, why in results.items() if why != ResizeResult.OK}
        if refused:
            self.batch.resize_tokens({r: n for r, n in before.items() if r is not None})
            for row in lengths:
                self._changed.forget(row)
        return refused

    def publish(self) -> Iterable[int]:
        """See `DsaManager`."""
        dirty = self.batch.publish(self._stream)
        try:
            self.batch.wait_ready(self._stream)
        except BaseException:
            self.batch.abort_step(self._stream)
            raise
        return dirty

    def _commit(self, step: DsaStep) -> None:
        rows = step.prepared.rows[: len(step.prepared.requests)]
        self.batch.record_read(rows, self._stream)
        self._selected.clear()

    def _base_table(self, layer_group: int) -> torch.Tensor:
        return self._tables[layer_group]

    def _key_buffers(self, layer: int) -> list[tuple[torch.Tensor, PageGeometry]]:
        return [(self._arenas[layer], self.config.latent_page)]

    def _write_slots(self, layer: int) -> tuple[torch.Tensor, Skip]:
        from torch.utils.dlpack import from_dlpack

        self._open("write_latents")
        return from_dlpack(self.resolved(layer).write_slots)[:, 0], "none"

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
        room = self.manager.occupancy()
        raise OutOfPages(
            f"[{function}] no lease or pages for a request of {cache.need} tokens: "
            f"{room.free_leases} leases free, largest run of free slots "
            f"{room.largest_free_arena_run}; suspend or free a request and try again"
        )

    def _known(self, function: str, request_id: int) -> KvCache:
        cache = self._caches.get(request_id)
        if cache is None:
            raise InvalidArgument(
                f"[{function}] request_id must be one of the manager's, got {request_id}"
            )
        return cache

    def _forget(self, cache: KvCache) -> None:
        if cache.row is not None:
            self._changed.forget(cache.row)
