"""The cache of a slice: one `KvCacheManager`, resident or offloaded, with requests that decode.

A manager gets the slice's whole budget (`Budget`). Histories are pages of one random pattern per
selection group, begun at a place of each request's own, so both sides read the same bytes whatever
pages they lie in. Histories are written by all cores, as transfers are received.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack

from benchmarks.decode_slice.budget import Budget, Mode
from benchmarks.decode_slice.model import SliceModel
from sparse_kvcm import (
    InvalidArgument,
    KvCache,
    KvCacheManager,
    OutOfPages,
    ResizeResult,
    Storage,
)
from sparse_kvcm.adapter.streams import current_stream
from sparse_kvcm.models import AttentionType, DeepSeekV4Geometry

_PATTERN = 127  # pages, a prime: requests begin at different ones


@dataclass(frozen=True)
class Buffer:
    """Pages of one buffer of a layer.

    Attributes
    ----------
    pages : torch.Tensor, uint8, shape (slots, page_bytes)
        At any stride.
    units : int
        Units of a page.
    table : torch.Tensor, int32, shape (rows, pages)
        Slot of each page of each row. Of an arena there is none; it is empty then.
    layer_group : int
        -1 of an arena.
    """

    pages: torch.Tensor
    units: int
    table: torch.Tensor
    layer_group: int = -1


def random_codes(*shape: int, seed: int) -> torch.Tensor:
    """E4M3 codes of at most 1.875, uint8, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    return codes & 0xBF  # clears the exponent's highest bit, so that none is a NaN


class SliceCache:
    """A manager with a Batch.

    Parameters
    ----------
    model : SliceModel
    mode : str
    batch : int
        Most requests.
    seq_len : int
        Most tokens of one.
    factor : float
        Cached slots of a lease in selections.
    device : str

    Attributes
    ----------
    units : dict of int to Buffer
        What selections choose from, by layer: pools, or arenas.
    index_keys : dict of int to Buffer
        By leader.
    windows, entries128 : dict of int to Buffer
        Of DeepSeek-V4, by layer.
    """

    def __init__(
        self, model: SliceModel, mode: Mode, batch: int, seq_len: int, factor: float, device: str
    ) -> None:
        self.model, self.mode, self.device = model, mode, device
        self.sizes = Budget(model, seq_len, factor, device)
        if self.sizes.pool_quota(mode, batch) == 0:
            raise InvalidArgument(
                f"[SliceCache] batch must fit into the slice's budget of {model.budget} B, at most "
                f"{self.sizes.largest_batch(mode)} requests of {seq_len} tokens, got {batch}"
            )
        self.manager = KvCacheManager(self.sizes.config(mode, batch))
        self.batch = self.manager.create_batch(batch, self.sizes.max_units)
        self._tables = from_dlpack(self.batch.page_tables)
        self._caches: list[KvCache] = []
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.index_keys: dict[int, Buffer] = {}
        self.windows: dict[int, Buffer] = {}
        self.entries128: dict[int, Buffer] = {}
        self._find_dense()
        self.units = self._find_units()
        self._patterns = self._make_patterns()

    @property
    def offloaded(self) -> bool:
        """Whether history is on the host."""
        return self.mode == "offloaded"

    @property
    def max_rows(self) -> int:
        """Most requests."""
        return self.batch.max_rows

    @property
    def stream(self) -> int:
        """Torch's current one."""
        return current_stream(self.device)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit in one layer."""
        return self.model.geometry.unit_layout("fp8").unit_bytes

    # --- requests ---

    def admit(self, prompts: Sequence[int]) -> None:
        """Seat a request for each prompt, in tokens, with its history.

        Raises
        ------
        OutOfPages
            If one does not fit, which the planner would have to know.
        """
        for number, tokens in enumerate(prompts):
            cache = self.manager.create_kv_cache(self.sizes.max_units)
            self._caches.append(cache)
            # Computed at once: windows of DeepSeek-V4 need their last pages alone.
            if not (cache.resume(self.stream) and cache.resize(tokens, tokens, self.stream)):
                raise OutOfPages(f"[SliceCache] request {number} of {tokens} tokens has no room")
        units = [tokens // self.model.geometry.tokens_per_unit for tokens in prompts]
        for number, (cache, count) in enumerate(zip(self._caches, units, strict=True)):
            if not self.offloaded:
                self._fill(number, cache, count)
            elif not cache.reserve_history(count):
                raise OutOfPages(f"[SliceCache] request {number} has no room on the host")
        if self.offloaded:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                list(threads.map(self._receive, range(len(units)), self._caches, units))
        for cache, tokens in zip(self._caches, prompts, strict=True):
            if self.offloaded:
                cache.commit_history(self.stream)
            self.rows.append(self.batch.add(cache))
            self.tokens.append(tokens)

    def release(self) -> None:
        """End all requests, and a step that failed."""
        if self.batch.step_open:
            self.batch.abort_step(self.stream)
        for cache in self._caches:
            cache.close()
        self._caches, self.rows, self.tokens = [], [], []

    # --- a step ---

    def begin_step(self) -> None:
        """Let each request grow by a token, and open a step.

        Raises
        ------
        OutOfPages
            If a request cannot grow.
        """
        self.tokens = [n + 1 for n in self.tokens]
        wanted = dict(zip(self.rows, self.tokens, strict=True))
        results = self.batch.resize_tokens(wanted, self.stream)
        refused = {row: why.name for row, why in results.items() if why != ResizeResult.OK}
        if refused:
            raise OutOfPages(f"[SliceCache] rows cannot grow: {refused}")
        self.batch.publish(self.stream)
        self.batch.wait_ready(self.stream)

    def end_step(self) -> None:
        """Commit it."""
        self.batch.record_read(self.rows, self.stream)

    def check(self) -> None:
        """Raise what the device reported.

        Raises
        ------
        RuntimeError
        """
        errors = self.batch.take_errors()
        if errors.rows or errors.batch:
            raise RuntimeError(f"[SliceCache] the device reported {errors}")

    # --- parts ---

    def _find_dense(self) -> None:
        geometry, tokens = self.model.geometry, self.model.tokens_per_block
        units = self.model.units_per_page
        for group in geometry.groups:
            storage_layer = geometry.index_layer_of(group[0])
            buffer = self._dense(storage_layer, geometry.index_role, units)
            self.index_keys[group[0]] = buffer
            self._fill_pages(buffer, keys=True)
        if not isinstance(geometry, DeepSeekV4Geometry):
            return
        for layer, ratio in enumerate(geometry.compress_ratios):
            kind = AttentionType.SWA
            storage_layer = geometry.storage_layer_of(kind, layer)
            self.windows[layer] = self._dense(storage_layer, kind.role, tokens)
            self._fill_pages(self.windows[layer])
            if ratio == 128:
                kind = AttentionType.COMPRESS
                storage_layer = geometry.storage_layer_of(kind, layer)
                self.entries128[layer] = self._dense(storage_layer, kind.role, tokens // 128)
                self._fill_pages(self.entries128[layer])

    def _find_units(self) -> dict[int, Buffer]:
        geometry, units = self.model.geometry, self.model.units_per_page
        if not self.offloaded:
            role = geometry.unit_roles[0]
            return {layer: self._dense(layer, role, units) for layer in geometry.history_layers}
        none = torch.empty((0, 0), dtype=torch.int32, device=self.device)
        return {
            layer: Buffer(from_dlpack(self.manager.arena(layer)), units, none)
            for layer in geometry.history_layers
        }

    def _dense(self, storage_layer: int, role: str, units: int) -> Buffer:
        storage: Storage = self.manager.storage
        place = storage.layout.place(storage_layer, role)
        memory = from_dlpack(storage.pool_memory(place.pool_group, place.pool))
        slots, slot_bytes = memory.shape
        pages = torch.as_strided(
            memory.view(-1), (slots, place.page_bytes), (slot_bytes, 1), place.offset_bytes
        )
        return Buffer(pages, units, self._tables[place.layer_group], place.layer_group)

    def _fill_pages(self, buffer: Buffer, *, keys: bool = False) -> None:
        """Give all pages the same bytes: which page one reads changes nothing but the time."""
        page = random_codes(buffer.pages.shape[1], seed=1)
        if keys:
            data = buffer.units * self.model.geometry.index_head_dim
            scales = torch.full((buffer.units,), 0.01).view(torch.uint8)
            page[data : data + len(scales)] = scales
        buffer.pages.copy_(page.to(self.device).expand(buffer.pages.shape))

    def _make_patterns(self) -> list[torch.Tensor]:
        """Pages with all member layers of a group, uint8 ``[pages, members, page_bytes]``."""
        size = self.model.units_per_page * self.unit_bytes
        patterns = [
            random_codes(_PATTERN, len(group), size, seed=2 + g)
            for g, group in enumerate(self.model.geometry.groups)
        ]
        return patterns if self.offloaded else [one.to(self.device) for one in patterns]

    def _fill(self, number: int, cache: KvCache, units: int) -> None:
        """Write the history of a resident request."""
        pages = -(-units // self.model.units_per_page)
        order = (torch.arange(pages, device=self.device) + number) % _PATTERN
        for g, group in enumerate(self.model.geometry.groups):
            for member, layer in enumerate(group):
                buffer = self.units[layer]
                slots = torch.from_numpy(cache.get_base_page_indices(buffer.layer_group))
                places = slots[:pages].long().to(self.device)
                buffer.pages[places] = self._patterns[g][order, member]

    def _receive(self, number: int, cache: KvCache, units: int) -> None:
        """Write the reserved history of a request that is offloaded."""
        per_page, first = self.model.units_per_page, 0
        while first < units:
            page = (first // per_page + number) % _PATTERN
            count = min(units - first, (_PATTERN - page) * per_page)
            for g, pattern in enumerate(self._patterns):
                pages = pattern[page : page - (-count // per_page)].flatten(1)
                offsets = [m * pattern.shape[2] for m in range(pattern.shape[1])]
                cache.write_history(g, first, count, pages.numpy(), offsets, per_page)
            first += count
