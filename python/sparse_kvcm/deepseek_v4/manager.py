"""The cache manager of DeepSeek-V4: seven kinds of cache, resident or with history on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, InvalidState, KvCache
from sparse_kvcm.deepseek_v4 import indices
from sparse_kvcm.deepseek_v4.access import Access
from sparse_kvcm.deepseek_v4.choice import refuse
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.history import DeepseekV4History, check_history, first_item
from sparse_kvcm.deepseek_v4.indices import AttentionIndices
from sparse_kvcm.deepseek_v4.offload_store import OffloadStore, check_unseated
from sparse_kvcm.deepseek_v4.resident_store import ResidentStore
from sparse_kvcm.deepseek_v4.step import At, DeepseekV4Step, StepMemory
from sparse_kvcm.deepseek_v4.store import Store
from sparse_kvcm.dsa.choice import ManagerFeatures
from sparse_kvcm.dsa.streams import current_stream
from sparse_kvcm.models import AttentionType
from sparse_kvcm.ops import ResolveOutputs
from sparse_kvcm.step import StepRequest, prepare

if TYPE_CHECKING:
    import torch

ALL = slice(None)


class DeepseekV4CacheManager:
    """Windows, compressor states, entries and index keys of a DeepSeek-V4.

    With `offload` entries of ratio 4 live on the host and everything else on the GPU, and a worker
    decodes only. Without, everything is on the GPU and prompts may be computed in steps.

    A step is `prepare_step`; per layer what it writes, then `select` at ratio 4, then what it
    reads; then `end_step`. A forward that fails needs no call: the next `prepare_step`, or
    `abort_step`, drops all that it began. One thread at a time.

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
        self.config = config
        self.store: Store
        arenas = {}
        if config.offload is None:
            self.store = ResidentStore(config)
        else:
            self.store = OffloadStore(config, config.offload)
            arenas = self.store.arenas
        self.access = Access(self.store.storage, config, arenas)
        self._memory = StepMemory(
            self.access.layer_groups, config.max_batch_size, config.max_pages, config.device
        )
        self._step: DeepseekV4Step | None = None
        self._resolved: dict[int, ResolveOutputs] = {}

    # --- requests ---

    def add_request(self, request_id: int, max_tokens: int) -> None:
        """Make a request that will have at most so many tokens.

        Raises
        ------
        InvalidArgument
            For an id in use, or more tokens than max_seq_len.
        OutOfPages
            If there is no room for it; it is unknown then.
        """
        self.store.add(request_id, max_tokens)

    def import_history(self, request_id: int, history: DeepseekV4History) -> None:
        """Give an empty request what was computed elsewhere.

        Raises
        ------
        InvalidArgument
            If it is not whole.
        InvalidState
            If the request has tokens, or a row.
        OutOfPages
            If there is no room; the request stays empty.
        """
        self._check_known("import_history", request_id)
        check_unseated(self.store, request_id)
        if self._step is not None:
            raise InvalidState("[import_history] a step is open; end or abort it first")
        geometry = self.config.geometry
        check_history(geometry, history)
        host = {
            layer: self.access.host_rows(history.items[layer, AttentionType.COMPRESS])
            for layer in self.access.arenas
        }
        has_units = history.tokens >= geometry.tokens_per_unit
        self.store.fill(request_id, history.tokens, host if has_units else None)
        for (layer, kind), rows in history.items.items():
            if kind is AttentionType.COMPRESS and layer in self.access.arenas:
                continue
            group = self.access.layer_group(layer, kind)
            ratio = geometry.compress_ratios[layer]
            begin = first_item(history.tokens, ratio, kind, len(rows))
            self.access.import_items(
                layer, kind, self.store.page_indices(request_id, group), begin, rows
            )

    def free_request(self, request_id: int) -> None:
        """End a request. What it had is reused once an open step no longer reads it."""
        self._check_known("free_request", request_id)
        self.store.free(request_id)

    def suspend_request(self, request_id: int) -> None:
        """Give a request's row back, and with `offload` its lease and GPU pages.

        Raises
        ------
        InvalidState
            In an open step.
        OutOfPages
            If there is no room for what it leaves; it stays as it was.
        """
        self._check_known("suspend_request", request_id)
        self.store.suspend(request_id)

    def resume_request(self, request_id: int) -> None:
        """Make a suspended request ready for `prepare_step`.

        Raises
        ------
        OutOfPages
            If there is no room; it stays suspended.
        """
        self._check_known("resume_request", request_id)
        self.store.resume(request_id)

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it, for who brings its tokens page by page.

        Raises
        ------
        InvalidState
            Without `offload`.
        """
        self._check_known("kv_cache", request_id)
        if not isinstance(self.store, OffloadStore):
            raise InvalidState("[kv_cache] everything is on the GPU, by page tables alone")
        return self.store.kv_cache(request_id)

    def frontier(self, request_id: int) -> int | None:
        """Tokens that the manager has of a request; None for one that it does not know."""
        return self.store.frontier(request_id)

    # --- one step ---

    def prepare_step(
        self, requests: Iterable[StepRequest], *, padded_size: int | None = None
    ) -> DeepseekV4Step:
        """Open a step and return its index tensors, in the order in which the forward runs it.

        Parameters
        ----------
        requests : iterable of StepRequest
            In any order; see `sparse_kvcm.step.prepare`, which also lists what is raised.
        padded_size : int, optional
            Rows of the graph that runs it.
        """
        self.store.check_late_errors()
        self._forget()
        prepared = prepare(
            self.store, requests, padded_size=padded_size, decode_only=self.store.decodes_only
        )
        try:
            self._step = self._memory.make(prepared, self.store)
        except BaseException:
            self.abort_step()
            raise
        return self._step

    def end_step(self) -> None:
        """Make the step's tokens real. Who still reads is waited for before memory is reused."""
        prepared = self._open("end_step").prepared
        self.store.commit(prepared.rows, prepared.requests)
        self._forget()

    def abort_step(self) -> None:
        """Drop the step: every request is as it was before. No-op without one."""
        self._forget()
        self.store.abort_open_step()

    @property
    def step(self) -> DeepseekV4Step | None:
        """The step that is open."""
        return self._step

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

        step = self._open("select")
        group = self.config.geometry.selection_group_of.get(layer)
        if group is None:
            raise InvalidArgument(
                f"[select] layer must have an indexer, one of "
                f"{self.config.geometry.history_layers}, got {layer}"
            )
        places = step.query_places[at]
        if not isinstance(self.store, OffloadStore):
            rows_per_page = self.config.units_per_page
            table = self.access.table(step, layer, AttentionType.COMPRESS)[places]
            return indices.global_indices(table, selection, rows_per_page)
        k, rows = selection.shape[1], step.rows[places].contiguous()
        if k == 0:  # no entry yet: every layer resolves in every step
            selection = selection.new_full((len(selection), 1), -1)
        stream = current_stream(self.config.device)
        batch = self.store.batch
        out = batch.resolve(group, rows, selection.contiguous(), stream=stream)
        batch.fetch(group, rows, out, stream=stream)
        self._resolved[layer] = out
        found: torch.Tensor = from_dlpack(out.slots)
        return found[:, :k]

    def resolved(self, layer: int) -> ResolveOutputs:
        """What the last `select` of an offloaded layer wrote: slots, counts, errors."""
        if layer not in self._resolved:
            raise InvalidState(
                f"[{type(self).__name__}] layer {layer} needs a selection first; call select"
            )
        return self._resolved[layer]

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
        ratio = self.config.geometry.compress_ratios[layer]
        if (selected is not None) != (ratio == 4):
            raise InvalidArgument(
                f"[attention_indices] selected must be given at ratio 4 alone, layer {layer} has "
                f"ratio {ratio}"
            )
        window = self.rows(layer, AttentionType.SWA, at)
        if ratio == 128:
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
        step = self._open("rows")
        ratio = self.config.geometry.compress_ratios[layer]
        lengths = step.query_lengths[at]
        if kind is AttentionType.SWA:
            local = indices.window_positions(lengths, width or self.config.geometry.sliding_window)
        else:
            most = self.config.max_seq_len // ratio if width is None else width
            local = indices.all_entries(lengths, ratio, most)
        table = self.access.table(step, layer, kind)[step.query_places[at]]
        per_page = self.access.layout(layer, kind).items_per_page
        return indices.global_indices(table, local, per_page)

    def read(self, layer: int, kind: AttentionType, rows: torch.Tensor) -> torch.Tensor:
        """Read elements at rows of `get_buffers`: float32 ``[..., width]``, zeros at -1."""
        self._open("read")
        return self.access.read(layer, kind, rows)

    def write_window(self, layer: int, values: torch.Tensor, at: At = ALL) -> None:
        """Write each query's key and value in one, float ``[n, head_dim]``."""
        step = self._open("write_window")
        items = step.query_lengths[at] - 1
        self.access.write(step, layer, AttentionType.SWA, step.query_places[at], items, values)

    def write_entries(
        self, layer: int, kind: AttentionType, values: torch.Tensor, at: At = ALL
    ) -> None:
        """Write the entries that queries complete, float ``[n, width]``.

        A row per query; those of queries that complete none are not looked at. Offloaded entries
        go to the slots that the layer's `select` gave, so it comes first.
        """
        step = self._open("write_entries")
        if kind is AttentionType.COMPRESS and layer in self.access.arenas:
            from torch.utils.dlpack import from_dlpack

            slots = from_dlpack(self.resolved(layer).write_slots)[:, 0]
            self.access.write_arena(layer, slots, values)
            return
        ratio = self.config.geometry.compress_ratios[layer]
        lengths = step.query_lengths[at]
        whole = indices.completes_entry(lengths, ratio)
        items = (indices.num_entries(lengths, ratio) - 1).masked_fill(~whole, -1)
        self.access.write(step, layer, kind, step.query_places[at], items, values)

    def write_states(
        self, layer: int, kind: AttentionType, values: torch.Tensor, at: At = ALL
    ) -> None:
        """Write the newest m inputs of a compressor up to each query, float ``[n, m, width]``."""
        self.access.write_states(self._open("write_states"), layer, kind, values, at)

    def read_states(
        self, layer: int, kind: AttentionType, count: int, skip: int = 0, at: At = ALL
    ) -> torch.Tensor:
        """Read inputs of a compressor, float32 ``[n, count, width]``.

        The newest ones up to each query but for the newest `skip`; zeros before the first token.
        """
        return self.access.read_states(self._open("read_states"), layer, kind, count, skip, at)

    def get_buffers(self, layer: int, kind: AttentionType) -> torch.Tensor:
        """A layer's pages of one type as kernels read them, uint8 ``[pages, page_bytes]``.

        Without a copy. Of windows and states the pool, of full histories the layer's buffer, of
        offloaded entries the arena, whose last page may be written freely.
        """
        return self.access.buffers(layer, kind)[0][0]

    # --- parts ---

    def _forget(self) -> None:
        self._step = None
        self._resolved.clear()

    def _open(self, function: str) -> DeepseekV4Step:
        if self._step is None:
            raise InvalidState(f"[{function}] no step is open; call prepare_step first")
        return self._step

    def _check_known(self, function: str, request_id: int) -> None:
        if self.store.frontier(request_id) is None:
            raise InvalidArgument(
                f"[{function}] request_id must be one of the manager's, got {request_id}"
            )
