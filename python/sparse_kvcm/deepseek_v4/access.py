"""Reading and writing the seven types: elements on one side, bytes in pages on the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, Storage
from sparse_kvcm.adapter import floats
from sparse_kvcm.adapter.scatter import Pages, Record, gather_regions, scatter, scatter_regions
from sparse_kvcm.adapter.slot_mapping import map_slots
from sparse_kvcm.deepseek_v4 import codecs
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.history import check_has, width_of
from sparse_kvcm.deepseek_v4.indices import check_row_count, map_items
from sparse_kvcm.deepseek_v4.pools import TypeLayout, TypePool, layout_of, make_pools
from sparse_kvcm.deepseek_v4.step import At, DeepseekV4Step
from sparse_kvcm.dsa.codecs import decode_index_keys, encode_index_keys
from sparse_kvcm.models import AttentionType, KvDtype, window_dtype
from sparse_kvcm.models.attention_types import types_of_ratio

if TYPE_CHECKING:
    import numpy as np
    import torch


class Access:
    """All types of all layers of a manager.

    Parameters
    ----------
    storage : Storage
    config : DeepseekV4CacheConfig
    arenas : mapping of int to torch.Tensor
        By layer whose entries are offloaded.
    """

    def __init__(
        self, storage: Storage, config: DeepseekV4CacheConfig, arenas: Mapping[int, torch.Tensor]
    ) -> None:
        self.arenas = dict(arenas)
        self._config = config
        self._layouts: dict[tuple[int, AttentionType], TypeLayout] = {}
        self.pools: dict[tuple[int, AttentionType], list[TypePool]] = {}
        geometry = config.geometry
        for ratio in sorted(set(geometry.compress_ratios)):
            for kind in types_of_ratio(ratio):
                layout = self._layouts[ratio, kind] = layout_of(config, kind, ratio)
                if not (arenas and ratio == 4 and kind is AttentionType.COMPRESS):
                    self.pools[ratio, kind] = make_pools(
                        storage, geometry, kind, ratio, layout.page
                    )
        for (ratio, kind), pools in self.pools.items():
            for pool in pools:
                rows = len(pool.view(next(iter(pool.layers)))) * pool.page.tokens_per_block
                check_row_count(f"{kind.name} at ratio {ratio}", rows)

    @property
    def layer_groups(self) -> list[int]:
        """Layer groups of the storage that have pages on the GPU."""
        return sorted({pools[0].layer_group for pools in self.pools.values()})

    def layout(self, layer: int, kind: AttentionType) -> TypeLayout:
        """How a layer's items lie in pages."""
        return self._layouts[self._key("layout", layer, kind)]

    def layer_group(self, layer: int, kind: AttentionType) -> int:
        """The layer group of a type's pages."""
        return self._pools(layer, kind)[0].layer_group

    def table(self, step: DeepseekV4Step, layer: int, kind: AttentionType) -> torch.Tensor:
        """Page indices of a layer's type, int32 ``[b, max_pages]``, as kernels see them."""
        pool = self._pools(layer, kind)[0]
        group = pool.layer_group
        return pool.table(layer, step.tables[group], step.scratch[group])

    def buffers(self, layer: int, kind: AttentionType) -> list[Pages]:
        """Pages by those indices, region by region where regions are buffers of their own."""
        key = self._key("get_buffers", layer, kind)
        if kind is AttentionType.COMPRESS and layer in self.arenas:
            return [(self.arenas[layer], self._layouts[key].page)]
        return [(pool.view(layer), pool.page) for pool in self.pools[key]]

    def kv_dtype(self, layer: int, kind: AttentionType) -> KvDtype:
        """Data type of windows and entries: selected ones have the configuration's."""
        config = self._config
        ratio = config.geometry.compress_ratios[layer]
        selected = kind is AttentionType.COMPRESS and ratio == 4
        return config.kv_dtype if selected else window_dtype(config.kv_dtype)

    # --- items of a step ---

    def write(
        self,
        step: DeepseekV4Step,
        layer: int,
        kind: AttentionType,
        places: torch.Tensor,
        items: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write items ``[n]`` of requests at places of the step; -1 is none."""
        record = self.encode(layer, kind, values)
        self._scatter(layer, kind, self.table(step, layer, kind), places, items, record)

    def write_arena(self, layer: int, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write entries to slots of a lease, all of which can be written."""
        ((arena, page),) = self.buffers(layer, AttentionType.COMPRESS)
        record = self.encode(layer, AttentionType.COMPRESS, values)
        scatter(arena, map_slots(slots, page), record, skip="none")

    def read(self, layer: int, kind: AttentionType, rows: torch.Tensor) -> torch.Tensor:
        """Read rows of the buffers, float32 ``[..., width]``."""
        flat = rows.reshape(-1)
        record = gather_regions(self.buffers(layer, kind), lambda page: map_slots(flat, page))
        values = self.decode(layer, kind, record)
        return values.view(*rows.shape, values.shape[-1])

    def write_states(
        self, step: DeepseekV4Step, layer: int, kind: AttentionType, values: torch.Tensor, at: At
    ) -> None:
        """Write the newest inputs up to each query, ``[n, m, width]``."""
        n, count, width = values.shape
        places, items = self._inputs("write_states", step, layer, kind, count, 0, at)
        # Of several inputs for one row of a ring the newest counts; without it order would decide.
        newest = step.lengths[places].long() - self.layout(layer, kind).page.tokens_per_block
        items = items.masked_fill(items < newest, -1)
        self.write(step, layer, kind, places, items, values.reshape(n * count, width))

    def read_states(
        self, step: DeepseekV4Step, layer: int, kind: AttentionType, count: int, skip: int, at: At
    ) -> torch.Tensor:
        """Read inputs behind the newest `skip`, ``[n, count, width]``."""
        places, items = self._inputs("read_states", step, layer, kind, count, skip, at)
        table, per_page = self.table(step, layer, kind), self.layout(layer, kind).items_per_page
        record = gather_regions(
            self.buffers(layer, kind), lambda page: map_items(table, places, items, page, per_page)
        )
        values = self.decode(layer, kind, record)
        return values.view(-1, count, values.shape[-1])

    # --- imports ---

    def import_items(
        self, layer: int, kind: AttentionType, slots: np.ndarray, first: int, values: torch.Tensor
    ) -> None:
        """Write items from `first` on, of one request, given its slots; those without a page go."""
        import torch

        device = self._config.device
        base = torch.from_numpy(slots).to(device)[None]
        pool = self._pools(layer, kind)[0]
        items = torch.arange(first, first + len(values), device=device)
        if kind.is_state:  # a ring keeps the newest
            items, values = (
                items[-pool.page.tokens_per_block :],
                values[-pool.page.tokens_per_block :],
            )
        record = self.encode(layer, kind, values.to(device))
        table = pool.table(layer, base)
        self._scatter(layer, kind, table, torch.zeros_like(items), items, record)

    def host_rows(self, entries: torch.Tensor) -> np.ndarray:
        """Offloaded entries as host history takes them, uint8 ``[n, unit_bytes]``."""
        import torch

        record = self._encode_entries(entries, self._config.kv_dtype)
        rows: np.ndarray = torch.cat(record, 1).contiguous().cpu().numpy()
        return rows

    # --- codecs ---

    def encode(self, layer: int, kind: AttentionType, values: torch.Tensor) -> Record:
        """Elements ``[n, width]`` as bytes."""
        import torch

        width = width_of(self._config.geometry, layer, kind)
        if values.ndim != 2 or values.shape[1] != width:
            raise InvalidArgument(
                f"[DeepseekV4CacheManager] {kind.name} of layer {layer} must be (n, {width}), "
                f"got {tuple(values.shape)}"
            )
        if kind.is_state:
            return (floats.to_bytes(values.to(torch.float32)),)
        if kind is AttentionType.INDEXER_COMPRESS:
            config = self._config
            return encode_index_keys(values, config.index_dtype, index_scale=config.index_scale)
        return self._encode_entries(values, self.kv_dtype(layer, kind))

    def decode(self, layer: int, kind: AttentionType, record: Record) -> torch.Tensor:
        """Bytes as elements, float32 ``[n, width]``."""
        import torch

        if kind.is_state:
            return record[0].contiguous().view(torch.float32)
        if kind is AttentionType.INDEXER_COMPRESS:
            return decode_index_keys(record, self._config.index_dtype)
        config = self._config
        return codecs.decode_entries(
            record,
            self.kv_dtype(layer, kind),
            head_dim=config.geometry.head_dim,
            rope=config.geometry.qk_rope_head_dim,
            scale=config.kv_scale,
        )

    # --- parts ---

    def _encode_entries(self, entries: torch.Tensor, kv_dtype: KvDtype) -> Record:
        rope, scale = self._config.geometry.qk_rope_head_dim, self._config.kv_scale
        return codecs.encode_entries(entries, kv_dtype, rope=rope, scale=scale)

    def _key(self, function: str, layer: int, kind: AttentionType) -> tuple[int, AttentionType]:
        geometry = self._config.geometry
        check_has(function, geometry, layer, kind)
        return geometry.compress_ratios[layer], kind

    def _pools(self, layer: int, kind: AttentionType) -> list[TypePool]:
        key = self._key("table", layer, kind)
        if key not in self.pools:
            raise InvalidArgument(
                f"[rows] {kind.name} of layer {layer} is offloaded: it has slots, by select"
            )
        return self.pools[key]

    def _inputs(
        self,
        function: str,
        step: DeepseekV4Step,
        layer: int,
        kind: AttentionType,
        count: int,
        skip: int,
        at: At,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and items, ``[n * count]`` each, of inputs up to each query."""
        import torch

        most = self.layout(layer, kind).page.tokens_per_block
        if not 1 <= count <= most - skip or skip < 0:
            raise InvalidArgument(
                f"[{function}] inputs of {kind.name} in layer {layer} must be within "
                f"the newest {most}, got {count} behind {skip}"
            )
        steps = torch.arange(-count - skip, -skip, device=step.lengths.device)
        items = step.query_lengths[at].long()[:, None] + steps
        places = step.query_places[at][:, None].expand_as(items)
        return places.reshape(-1), items.clamp(min=-1).reshape(-1)

    def _scatter(
        self,
        layer: int,
        kind: AttentionType,
        table: torch.Tensor,
        places: torch.Tensor,
        items: torch.Tensor,
        record: Record,
    ) -> None:
        per_page = self.layout(layer, kind).items_per_page
        scatter_regions(
            self.buffers(layer, kind),
            record,
            lambda page: map_items(table, places, items, page, per_page),
        )
