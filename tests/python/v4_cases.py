"""A small DeepSeek-V4, its managers, and items whose values tell which they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparse_kvcm.deepseek_v4 import (
    AttentionType,
    DeepseekV4CacheConfig,
    DeepseekV4CacheManager,
    DeepseekV4History,
    OffloadSizes,
)
from sparse_kvcm.models import DeepSeekV4Geometry, geometry_of
from sparse_kvcm.step import StepRequest

torch.set_num_threads(1)
SWA, C, INDEX = AttentionType.SWA, AttentionType.COMPRESS, AttentionType.INDEXER_COMPRESS
STATES = [kind for kind in AttentionType if kind.name.endswith(("_KV", "_SCORE"))]
TOP_K, WINDOW = 16, 40
MIB = 1 << 20


def geometry(**changes: Any) -> DeepSeekV4Geometry:
    """Five layers: window, 4, 128, 4, 128; FlashMLA's widths only if `changes` say so."""
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 5,
        "compress_ratios": [0, 4, 128, 4, 128, 0],
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "sliding_window": WINDOW,
        "index_topk": TOP_K,
        "index_head_dim": 32,
        "max_position_embeddings": 4096,
    }
    made = geometry_of(config | changes)
    assert isinstance(made, DeepSeekV4Geometry)
    return made


def cache_config(offloads: bool, **changes: Any) -> DeepseekV4CacheConfig:
    """Three requests of up to 900 tokens."""
    fields: dict[str, Any] = {
        "geometry": geometry(),
        "max_batch_size": 3,
        "max_seq_len": 900,
        "gpu_quota": 8 * MIB,
        "index_dtype": "bf16",
        "tokens_per_block": 128,
        "max_util_for_resume": 1.0,
    }
    fields |= changes
    if offloads:
        page = fields["tokens_per_block"] // 4
        pages = -(-fields["max_seq_len"] // fields["tokens_per_block"])
        host = fields["max_batch_size"] * pages
        sizes = OffloadSizes(max(page, TOP_K), host_pages=host, cold_quota=8 * MIB)
        fields.setdefault("offload", sizes)
    return DeepseekV4CacheConfig(**fields)


def manager(offloads: bool, **changes: Any) -> DeepseekV4CacheManager:
    return DeepseekV4CacheManager(cache_config(offloads, **changes))


def width(model: DeepSeekV4Geometry, layer: int, kind: AttentionType) -> int:
    """Written from the contract: both series of an overlapping compressor lie side by side."""
    series = 2 if model.compress_ratios[layer] == 4 else 1
    if kind in STATES[2:]:
        return series * model.index_head_dim
    if kind in STATES:
        return series * model.head_dim
    return model.index_head_dim if kind is INDEX else model.head_dim


def values(
    model: DeepSeekV4Geometry, request: int, layer: int, kind: AttentionType, items: Any
) -> torch.Tensor:
    """[n, width], different for each item; BF16 holds them exactly."""
    rows = [
        np.random.default_rng([request, layer, int(kind), int(item)]).integers(
            -64, 64, width(model, layer, kind)
        )
        for item in items
    ]
    made = np.stack(rows) if rows else np.zeros((0, width(model, layer, kind)))
    return torch.from_numpy(made.astype(np.float32))


def kinds_of(ratio: int) -> list[AttentionType]:
    if ratio == 4:
        return list(AttentionType)
    return [SWA, *STATES[:2], C] if ratio == 128 else [SWA]


def history(model: DeepSeekV4Geometry, request: int, tokens: int) -> DeepseekV4History:
    """All of a prompt; windows and states whole, which is more than is needed."""
    items = {}
    for layer, ratio in enumerate(model.compress_ratios):
        for kind in kinds_of(ratio):
            count = tokens // ratio if kind in (C, INDEX) else tokens
            items[layer, kind] = values(model, request, layer, kind, range(count))
    return DeepseekV4History(tokens, items)


def requests_of(lengths: dict[int, int]) -> list[StepRequest]:
    return [StepRequest(one, length) for one, length in lengths.items()]


Inputs = dict[tuple[int, Any], torch.Tensor]


def forward(made: DeepseekV4CacheManager, inputs: Inputs) -> Inputs:
    """A step's calls, layer by layer, and what each layer reads; ``"rows"``: by which indices."""
    found: Inputs = {}
    for layer, ratio in enumerate(made.config.geometry.compress_ratios):
        made.write_window(layer, inputs[layer, SWA])
        for kind in kinds_of(ratio):
            if kind in STATES:
                made.write_states(layer, kind, inputs[layer, kind][:, None])
                found[layer, kind] = made.read_states(layer, kind, 8 if ratio == 4 else 128)
        selected = None
        if ratio == 4:
            made.write_entries(layer, INDEX, inputs[layer, INDEX])
            found[layer, INDEX] = made.read(layer, INDEX, made.rows(layer, INDEX))
            selected = made.select(layer, inputs[layer, "selection"])
        if ratio in (4, 128):
            made.write_entries(layer, C, inputs[layer, C])
        index = made.attention_indices(layer, selected)
        found[layer, SWA] = made.read(layer, SWA, index.window)
        if ratio in (4, 128):
            found[layer, C] = made.read(layer, C, index.compressed)
        found[layer, "rows"] = index.rows
    return found


class Reader:
    """Makes a step's inputs, and compares all that each layer reads with what was written."""

    def __init__(self, made: DeepseekV4CacheManager, rng: np.random.Generator) -> None:
        self.manager = made
        self.model = made.config.geometry
        self.rng = rng
        self.selected: dict[int, torch.Tensor] = {}

    def new(self, layer: int, kind: AttentionType, ratio: int = 1) -> torch.Tensor:
        """[b, width]; 77 where no item becomes whole: nobody may see it."""
        step = self.manager.step
        assert step is not None
        rows = torch.full((len(step.rows), width(self.model, layer, kind)), 77.0)
        for i, one in enumerate(step.prepared.requests):
            if one.length % ratio == 0:
                item = one.length // ratio - 1
                rows[i] = values(self.model, one.request_id, layer, kind, [item])[0]
        return rows

    def selection(self, b: int) -> torch.Tensor:
        """[b, top-k] distinct entries, the newest among them, -1 anywhere."""
        step = self.manager.step
        assert step is not None
        rows = np.full((b, TOP_K), -1, np.int32)
        for row, one in zip(rows, step.prepared.requests, strict=False):
            count = one.length // 4
            chosen = self.rng.choice(count, min(TOP_K - 2, count), replace=False)
            if len(chosen):
                chosen[0] = count - 1
            chosen = np.unique(chosen)
            row[self.rng.permutation(TOP_K)[: len(chosen)]] = chosen
        return torch.from_numpy(rows)

    def inputs(self) -> Inputs:
        """What a forward of the open step writes and selects, on the CPU."""
        step, made = self.manager.step, {}
        assert step is not None
        for layer, ratio in enumerate(self.model.compress_ratios):
            for kind in kinds_of(ratio):
                made[layer, kind] = self.new(layer, kind, ratio if kind in (C, INDEX) else 1)
            if ratio == 4:
                made[layer, "selection"] = self.selection(len(step.rows))
        return made

    def run(self) -> None:
        """A forward over all layers, in the order of the model."""
        inputs = self.inputs()
        self.check_all(inputs, forward(self.manager, inputs))

    def check_all(self, inputs: Inputs, found: Inputs) -> None:
        """Compare what a forward with these inputs read; both on the CPU."""
        for layer, ratio in enumerate(self.model.compress_ratios):
            self.check(layer, SWA, found[layer, SWA], lambda n: range(max(0, n - WINDOW), n))
            for kind in kinds_of(ratio):
                if kind in STATES:
                    self.check_states(layer, kind, ratio, found[layer, kind])
            if ratio == 4:
                self.check(layer, INDEX, found[layer, INDEX], lambda n: range(n // 4))
                selected = inputs[layer, "selection"]
                rows = found[layer, "rows"][:, WINDOW:]
                self.check_selected(layer, selected, rows, found[layer, C])
                self.selected[layer] = found[layer, C]
            elif ratio == 128:
                self.check(layer, C, found[layer, C], lambda n: range(n // 128))

    def check_states(self, layer: int, kind: AttentionType, ratio: int, found: Any) -> None:
        rows = 8 if ratio == 4 else 128
        step = self.manager.step
        assert step is not None
        for row, one in zip(found, step.prepared.requests, strict=False):
            # What the entries to come are made of.
            begun = one.length % ratio or ratio
            need = min(one.length, begun + (4 if ratio == 4 else 0))
            items = range(one.length - need, one.length)
            wanted = values(self.model, one.request_id, layer, kind, items)
            torch.testing.assert_close(row[rows - need :], wanted, rtol=0, atol=0)

    def check_selected(self, layer: int, selection: Any, rows: Any, found: Any) -> None:
        """Every selected entry has a row, nothing else has one, and each has the entry."""
        step = self.manager.step
        assert step is not None
        assert torch.equal(rows >= 0, selection >= 0)
        for row, names, one in zip(found, selection, step.prepared.requests, strict=False):
            wanted = values(self.model, one.request_id, layer, C, names[names >= 0])
            torch.testing.assert_close(row[names >= 0], wanted, rtol=0, atol=0)
        assert not found[selection < 0].any()

    def check(self, layer: int, kind: AttentionType, found: torch.Tensor, items: Any) -> None:
        step = self.manager.step
        assert step is not None
        for i, row in enumerate(found):
            padding = i >= len(step.prepared.requests)
            one = None if padding else step.prepared.requests[i]
            wanted = items(one.length if one else 0)
            expected = values(self.model, one.request_id if one else 0, layer, kind, wanted)
            torch.testing.assert_close(row[: len(wanted)], expected, rtol=0, atol=0)
            assert not row[len(wanted) :].any()


class Run:
    """Requests of one manager through steps."""

    def __init__(self, offloads: bool, seed: int = 0, **changes: Any) -> None:
        self._serve(manager(offloads, **changes), seed)

    @classmethod
    def of(cls, made: DeepseekV4CacheManager) -> Run:
        """One of a manager that is there."""
        run = cls.__new__(cls)
        run._serve(made, 0)
        return run

    def _serve(self, made: DeepseekV4CacheManager, seed: int) -> None:
        self.manager = made
        self.reader = Reader(made, np.random.default_rng(seed))
        self.lengths: dict[int, int] = {}

    def add(self, request: int, prompt: int, most: int = 900) -> None:
        self.manager.add_request(request, most)
        made = history(self.manager.config.geometry, request, prompt)
        self.manager.import_history(request, made)
        self.lengths[request] = prompt

    def open(self, padded: int | None = None) -> None:
        order = [StepRequest(one, n, batch_index=one) for one, n in self.lengths.items()]
        self.manager.prepare_step(order, padded_size=padded)

    def step(self, count: int = 1, padded: int | None = None) -> None:
        for _ in range(count):
            self.open(padded)
            self.reader.run()
            self.manager.end_step()
            for request in self.lengths:
                self.lengths[request] += 1
