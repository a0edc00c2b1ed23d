"""The cache manager of DeepSeek-V4: seven kinds of cache, resident or with history on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm._core import (
    InvalidArgument,
    InvalidState,
    KvCache,
    KvCacheManager,
    Storage,
    StorageFill,
)
from sparse_kvcm.adapter.batch_store import BatchStore
from sparse_kvcm.adapter.config import ManagerFeatures
from sparse_kvcm.adapter.manager import RequestManager
from sparse_kvcm.adapter.page_store import PageStore
from sparse_kvcm.adapter.store import Store, check_int
from sparse_kvcm.deepseek_v4 import indices
from sparse_kvcm.deepseek_v4.access import Access
from sparse_kvcm.deepseek_v4.arguments import FULL, Arguments, check_at, check_history
from sparse_kvcm.deepseek_v4.choice import refuse
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.history import DeepseekV4History, first_item
from sparse_kvcm.deepseek_v4.indices import AttentionIndices
from sparse_kvcm.deepseek_v4.step import At, DeepseekV4Step, StepMemory
from sparse_kvcm.models import AttentionType
from sparse_kvcm.models.attention_types import STATES
from sparse_kvcm.ops import ResolveOutputs
from sparse_kvcm.step import PreparedStep

if TYPE_CHECKING:
    import torch

ALL = slice(None)


class DeepseekV4CacheManager(RequestManager[DeepseekV4Step]):
    """Windows, compressor states, entries and index keys of a DeepSeek-V4.

    With `offload` entries of ratio 4 live on the host and everything else on the GPU, and a worker
    decodes only. Without, everything is on the GPU and prompts may be computed in steps.

    A step is `prepare_step`; per layer what it writes, then `select` at ratio 4, then what it
    reads; then `end_step`. See `RequestManager` for requests and for a forward that fails.

    Most calls take `at`: the queries they are for, all of them by default. A row is selected for
    once per step and layer, so an engine may run its requests in several forwards of one step;
    results of `select` hold until the next call for the layer.

    Parameters
    ----------
    config : DeepseekV4CacheConfig
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    NotImplementedError
        For what it does not do, see `sparse_kvcm.deepseek_v4.choice`.
    """

    def __init__(
        self, config: DeepseekV4CacheConfig, features: ManagerFeatures | None = None
    ) -> None:
        refuse(features or ManagerFeatures())
        from torch.utils.dlpack import from_dlpack

        self.config = config
        self.store: Store
        arenas = {}
        if config.offload is None:
            storage = Storage(config.storage_config(), StorageFill.AT_ONCE)
            self.store = PageStore(storage, config.max_batch_size, config.max_seq_len)
        else:
            manager = KvCacheManager(config.manager_config(config.offload))
            # Rows of padding, and those whose entry is not whole, write somewhere: no branch.
            batch = manager.create_batch(
                config.max_batch_size,
                config.units(config.max_seq_len),
                no_write_slot=manager.trash_slot,
            )
            self.store = BatchStore(manager, batch, config.max_seq_len)
            arenas = {layer: from_dlpack(manager.arena(layer)) for layer in manager.layers}
        self.access = Access(self.store.storage, config, arenas)
        self._memory = StepMemory(
            self.access.layer_groups, config.max_batch_size, config.max_pages, config.device
        )
        self._arguments = Arguments(config)
        self._resolved: dict[int, tuple[At, ResolveOutputs]] = {}

    # --- requests ---

    def import_history(self, request_id: int, history: DeepseekV4History) -> None:
        """Give an empty request what was computed elsewhere.

        Raises
        ------
        InvalidArgument
            If it is not whole, or longer than the request may get.
        InvalidState
            If the request has tokens or a row, is suspended, or a step is open.
        OutOfPages
            If there is no room; the request stays empty.
        """
        tokens = self._check_known("import_history", request_id)
        if tokens or self.store.row_of(request_id) is not None:
            raise InvalidState(
                f"[import_history] request {request_id} must be empty: windows and compressor "
                "states come whole, so a history is imported once"
            )
        self._check_closed("import_history")
        check_history(self.config.geometry, history, self.store.max_tokens(request_id))
        self.store.take(request_id, history.tokens, history.tokens)
        try:
            self._import_items(request_id, history)
        except BaseException:
            self.store.renew(request_id)  # history cannot go back
            raise

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it, for who brings its tokens page by page.

        Raises
        ------
        InvalidState
            Without `offload`.
        """
        self._check_known("kv_cache", request_id)
        if not isinstance(self.store, BatchStore):
            raise InvalidState("[kv_cache] everything is on the GPU, by page tables alone")
        return self.store.kv_cache(request_id)

    # --- one step ---

    def select(self, layer: int, selection: torch.Tensor, at: At = ALL) -> torch.Tensor:
        """Find the entries that a layer's indexer selected; offloaded ones are fetched.

        Parameters
        ----------
        layer : int
            Of ratio 4.
        selection : torch.Tensor, int32, shape (n, k)
            Ordinals of entries, -1 anywhere for none; k at most top-k. An entry that the query's
            token completes may be among them.

        Returns
        -------
        torch.Tensor, int, shape (n, k)
            Rows of `get_buffers`, -1 = none.
        """
        from torch.utils.dlpack import from_dlpack

        step = self.require_step_at("select", at)
        places = step.query_places[at]
        self._arguments.selection(layer, selection, len(places))
        if not isinstance(self.store, BatchStore):
            rows_per_page = self.config.units_per_page
            table = self.access.table(step, layer, AttentionType.COMPRESS)[places]
            whole = indices.num_entries(step.query_lengths[at], 4)[:, None]
            there = selection.masked_fill(selection >= whole, -1)
            return indices.global_indices(table, there, rows_per_page)
        k, rows = selection.shape[1], step.rows[places].contiguous()
        if k == 0:  # no entry yet: every layer resolves in every step
            selection = selection.new_full((len(selection), 1), -1)
        group = self.config.geometry.selection_group_of[layer]
        out = self.store.select(group, rows, selection.contiguous())
        self._resolved[layer] = at, out
        found: torch.Tensor = from_dlpack(out.slots)
        return found[:, :k]

    def resolved(self, layer: int) -> ResolveOutputs:
        """What the last `select` of an offloaded layer wrote: slots, counts, errors."""
        self._arguments.layer("resolved", layer, AttentionType.INDEXER_COMPRESS)
        if layer not in self._resolved:
            lacks = "needs a selection first; call select"
            if self.config.offload is None:
                lacks = "is on the GPU, and nothing is resolved"
            raise InvalidState(f"[resolved] layer {layer} {lacks}")
        return self._resolved[layer][1]

    def write_slots(self, layer: int, at: At = ALL) -> torch.Tensor:
        """Slots of the entries that queries complete in an offloaded layer, int32 ``[n]``.

        Of the layer's `select`, which comes first. A query that completes none has one that nobody
        reads.
        """
        from torch.utils.dlpack import from_dlpack

        slots: torch.Tensor = from_dlpack(self.resolved(layer).write_slots)[:, 0]
        if self._resolved[layer][0] != at:
            raise InvalidArgument(
                f"[write_slots] at must be that of the layer's select, {self._resolved[layer][0]}, "
                f"got {at}"
            )
        return slots

    def attention_indices(
        self, layer: int, selected: torch.Tensor | None = None, at: At = ALL
    ) -> AttentionIndices:
        """What a layer's attention reads: the window's rows, then compressed ones.

        Parameters
        ----------
        layer : int
        selected : torch.Tensor, int, shape (n, k), optional
            At ratio 4: the result of `select`. At ratio 128 all whole entries are read.
        """
        n = len(self.require_step_at("attention_indices", at).query_places[at])
        self._arguments.selected(layer, selected, n)
        window = self.rows(layer, AttentionType.SWA, at)
        if self.config.geometry.compress_ratios[layer] == 128:
            selected = self.rows(layer, AttentionType.COMPRESS, at)
        return indices.join(window, selected)

    def rows(
        self, layer: int, kind: AttentionType, at: At = ALL, width: int | None = None
    ) -> torch.Tensor:
        """Rows of `get_buffers` of all that each query sees of one type, int64 ``[n, width]``.

        Of windows the tokens, of full histories the whole entries, oldest first, -1 behind them.

        Parameters
        ----------
        width : int, optional
            Columns; None: what the longest request may need.
        """
        step, geometry = self.require_step_at("rows", at), self.config.geometry
        self._arguments.layer("rows", layer, kind, (AttentionType.SWA, *FULL))
        ratio, is_window = geometry.compress_ratios[layer], kind is AttentionType.SWA
        most = geometry.sliding_window if is_window else self.config.max_seq_len // ratio
        width = most if width is None else width
        check_int("rows", "width", width, 0, most)
        lengths = step.query_lengths[at]
        if is_window:
            local = indices.window_positions(lengths, width)
        else:
            local = indices.all_entries(lengths, ratio, width)
        table = self.access.table(step, layer, kind)[step.query_places[at]]
        per_page = self.access.layout(layer, kind).items_per_page
        return indices.global_indices(table, local, per_page)

    def read(self, layer: int, kind: AttentionType, rows: torch.Tensor) -> torch.Tensor:
        """Read elements at rows of `get_buffers`: float32 ``[..., width]``, zeros at -1."""
        self.require_step("read")
        self._arguments.rows(layer, kind, rows)
        return self.access.read(layer, kind, rows)

    def write_window(self, layer: int, values: torch.Tensor, at: At = ALL) -> None:
        """Write each query's key and value in one, float ``[n, head_dim]``."""
        step = self.require_step_at("write_window", at)
        items = step.query_lengths[at] - 1
        self._arguments.values("write_window", layer, AttentionType.SWA, values, len(items))
        self.access.write(step, layer, AttentionType.SWA, step.query_places[at], items, values)

    def write_entries(
        self, layer: int, kind: AttentionType, values: torch.Tensor, at: At = ALL
    ) -> None:
        """Write the entries that queries complete, float ``[n, width]``.

        A row per query; those of queries that complete none are not looked at. Offloaded entries
        go to the slots that the layer's `select` gave, so it comes first.
        """
        step = self.require_step_at("write_entries", at)
        lengths = step.query_lengths[at]
        self._arguments.values("write_entries", layer, kind, values, len(lengths), FULL)
        if kind is AttentionType.COMPRESS and layer in self.access.arenas:
            slots = self.write_slots(layer, at)
            self.access.write_arena(layer, slots, values)
            return
        items = indices.completed_entries(lengths, self.config.geometry.compress_ratios[layer])
        self.access.write(step, layer, kind, step.query_places[at], items, values)

    def write_states(
        self, layer: int, kind: AttentionType, values: torch.Tensor, at: At = ALL
    ) -> None:
        """Write the newest m inputs of a compressor up to each query, float ``[n, m, width]``."""
        step = self.require_step_at("write_states", at)
        n = len(step.query_places[at])
        self._arguments.values("write_states", layer, kind, values, n, STATES)
        self.access.write_states(step, layer, kind, values, at)

    def read_states(
        self, layer: int, kind: AttentionType, count: int, skip: int = 0, at: At = ALL
    ) -> torch.Tensor:
        """Read inputs of a compressor, float32 ``[n, count, width]``.

        The newest ones up to each query but for the newest `skip`; zeros before the first token.
        """
        step = self.require_step_at("read_states", at)
        self._arguments.layer("read_states", layer, kind, STATES)
        check_int("read_states", "count", count)
        check_int("read_states", "skip", skip)
        return self.access.read_states(step, layer, kind, count, skip, at)

    def get_buffers(self, layer: int, kind: AttentionType) -> torch.Tensor:
        """A layer's pages of one type as kernels read them, uint8 ``[pages, page_bytes]``.

        Without a copy. Of windows and states the pool, of full histories the layer's buffer, of
        offloaded entries the arena, whose last page may be written freely.
        """
        self._arguments.layer("get_buffers", layer, kind)
        return self.access.buffers(layer, kind)[0][0]

    def require_step_at(self, function: str, at: At) -> DeepseekV4Step:
        """The step that is open, which must have these queries, for a call of this name.

        Raises
        ------
        InvalidState
            If none is.
        InvalidArgument
            For queries that it does not have.
        """
        step = self.require_step(function)
        check_at(function, at, len(step.query_places))
        return step

    # --- parts ---

    def _make_step(self, prepared: PreparedStep) -> DeepseekV4Step:
        return self._memory.make(prepared, self.store)

    def _forget_selections(self) -> None:
        self._resolved.clear()

    def _import_items(self, request_id: int, history: DeepseekV4History) -> None:
        """Write them to the pages that the request has for them, or append them on the host."""
        geometry = self.config.geometry
        if isinstance(self.store, BatchStore) and history.tokens >= geometry.tokens_per_unit:
            units = {
                layer: self.access.host_rows(history.items[layer, AttentionType.COMPRESS])
                for layer in self.access.arenas
            }
            self.store.import_units(request_id, units)
        for (layer, kind), rows in history.items.items():
            if kind is AttentionType.COMPRESS and layer in self.access.arenas:
                continue
            group = self.access.layer_group(layer, kind)
            ratio = geometry.compress_ratios[layer]
            begin = first_item(history.tokens, ratio, kind, len(rows))
            self.access.import_items(
                layer, kind, self.store.page_indices(request_id, group), begin, rows
            )
