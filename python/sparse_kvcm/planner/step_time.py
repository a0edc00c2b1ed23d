"""How long a decode step takes: sums of what its parts do, times what a GPU takes for each.

    experts     layers, bytes of the experts that a batch meets, products with them
    rest        bytes of all other matrices, rows
    attention   layers, rows, products of queries with units
    indexer     indexers, units that the busiest multiprocessor sorts, products with keys
    cache       resolve, the flush and look-ups in page tables: groups, rows of them
    fetch       groups, bytes by the link's rate; or stretches of host memory, where they bind

Every figure is linear in its part's `Costs`. These were fitted to committed runs of a slice
(`python -m benchmarks.decode_slice.fit` prints them, and how far each run that was left out is
missed); they are those of that benchmark's kernels. Nothing is hidden behind anything else, and
no rank waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparse_kvcm.models import DeepSeekV4Geometry, DsaGeometry, ModelCompute, ModelGeometry

Costs = Mapping[str, tuple[float, ...]]  # part -> milliseconds of each of its sums

# Rows that lie far apart wait for the translation of their addresses: what counts then is in how
# many stretches of host memory they lie, of so many bytes, where a copy would outrun so many.
STRETCH_BYTES = 1 << 16
STRETCHES_PER_S = 48e6
MULTIPROCESSORS = 132

# One H200, PCIe Gen5 x16: benchmarks/results/h200/decode_slice.json, GLM-5.2 of 4,000 to 131,072
# tokens, DeepSeek-V3.2 and V4 Flash of 32,768, 1 to 1,127 requests, FP8 units and experts. All 38
# runs are within 5.5 % of it; within 6 % if the runs of their batch are left out of the fit, and
# within 12.4 % if those of their model are.
H200: Costs = {
    "experts": (0.1279, 0.2892, 4.0),  # of a layer; of 1e9 bytes; of 1e12 products
    "rest": (0.4253, 0.4355),  # of 1e9 bytes; of 1,000 rows
    "attention": (0.02249, 0.09883, 9.355),  # of a layer; of 1,000 rows; of 1e12 products
    "indexer": (0.09775, 5.82, 8.751),  # of an indexer; of 1e6 units; of 1e12 products
    "cache": (0.02091, 0.01145),  # of a group; of 1,000 rows
    "fetch": (0.01029, 1.12, 22.12),  # of a group; of a copy's ms; of 1e6 stretches
}


@dataclass(frozen=True)
class Step:
    """A decode step of one rank.

    Attributes
    ----------
    geometry : ModelGeometry
    batch : int
        Requests, with padding of a captured graph.
    seq_len : int
        Tokens of each.
    expert_ranks : int
        Ranks that divide the experts, each with as many requests as this one.
    misses : float
        Units that a request misses per selection group.
    row_bytes : tuple of int
        Bytes of a host row, by selection group; none without offload.
    link_gb_s : float
        What a copy from host to device reaches, 10^9 bytes a second.
    """

    geometry: ModelGeometry
    batch: int
    seq_len: int
    expert_ranks: int = 1
    misses: float = 0.0
    row_bytes: tuple[int, ...] = ()
    link_gb_s: float = 55.0

    def sums(self) -> dict[str, tuple[float, ...]]:
        """What each part does, in the order of its costs; the model's if its sizes are known."""
        compute = self.geometry.compute
        own = {} if compute is None else self._model_sums(compute)
        return own | (self._offload_sums() if self.row_bytes else {})

    def parts_ms(self, costs: Costs = H200) -> dict[str, float]:
        """Milliseconds by part."""
        return {
            part: sum(a * b for a, b in zip(sums, costs[part], strict=True))
            for part, sums in self.sums().items()
        }

    def _model_sums(self, compute: ModelCompute) -> dict[str, tuple[float, ...]]:
        layers, rows, groups = self.geometry.num_layers, self.batch, len(self.geometry.groups)
        width, latent = _widths(self.geometry)
        met = self._experts_met(compute) * compute.expert_weights  # FP8, so bytes too
        chosen = rows * compute.experts_per_token * compute.expert_weights
        dense = 2 * compute.dense_weights(width, latent)  # BF16
        attended = rows * compute.heads * (width + latent) * self._units_read()
        units = self.seq_len // self.geometry.tokens_per_unit
        sorted_units = math.ceil(rows / MULTIPROCESSORS) * units  # of one row by one of them
        scored = rows * units * compute.index_heads * self.geometry.index_head_dim
        return {
            "experts": (layers, layers * met / 1e9, layers * chosen / 1e12),
            "rest": (layers * dense / 1e9, layers * rows / 1e3),
            "attention": (layers, layers * rows / 1e3, attended / 1e12),
            "indexer": (groups, groups * sorted_units / 1e6, groups * scored / 1e12),
        }

    def _offload_sums(self) -> dict[str, tuple[float, ...]]:
        groups, units = len(self.geometry.groups), self.seq_len / self.geometry.tokens_per_unit
        copied_ms, stretches = 0.0, 0.0
        for size in self.row_bytes:
            copy_ms = self.batch * self.misses * size / self.link_gb_s / 1e6
            read = self.batch * _distinct(max(1.0, units * size / STRETCH_BYTES), self.misses)
            if copy_ms < read / STRETCHES_PER_S * 1e3:
                stretches += read
            else:
                copied_ms += copy_ms
        return {
            "cache": (groups, groups * self.batch / 1e3),
            "fetch": (groups, copied_ms, stretches / 1e6),
        }

    def _experts_met(self, compute: ModelCompute) -> float:
        """Of this rank, in a layer, by at least one token of any rank; tokens choose evenly."""
        choices = self.expert_ranks * self.batch
        met = 1 - (1 - compute.experts_per_token / compute.experts) ** choices
        return compute.experts / self.expert_ranks * met

    def _units_read(self) -> float:
        """Units that one query of each layer is multiplied with, of all layers together."""
        one, seq_len = self.geometry, self.seq_len
        selected = min(one.top_k, seq_len // one.tokens_per_unit)
        if not isinstance(one, DeepSeekV4Geometry):
            return one.num_layers * selected
        window = min(one.sliding_window, seq_len)
        others = {4: selected, 128: seq_len // 128}
        return sum(window + others.get(ratio, 0) for ratio in one.compress_ratios)


def _distinct(places: float, picks: float) -> float:
    """How many of `places` are picked at least once by so many even picks."""
    return places * -math.expm1(-picks / places)


def _widths(geometry: ModelGeometry) -> tuple[int, int]:
    """Elements of a unit, and of what attention returns per head."""
    if isinstance(geometry, DsaGeometry):
        return geometry.kv_lora_rank + geometry.qk_rope_head_dim, geometry.kv_lora_rank
    assert isinstance(geometry, DeepSeekV4Geometry)
    return geometry.head_dim, geometry.head_dim
