"""One decode step of a slice, as it is captured: from the tokens' rows to the last layer's output.

The rows of a step run in *parts*: all together, or in two halves of which one computes while the
other's misses are fetched. A part is a generator that stops once its fetch is on the way, so that
the other part's work is launched behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch.nn.functional import silu

from benchmarks.decode_slice import device_ops
from benchmarks.decode_slice.attention import Attention, merge
from benchmarks.decode_slice.cache import Buffer, SliceCache
from benchmarks.decode_slice.clock import Clock
from benchmarks.decode_slice.weights import LayerWeights, Weights, normal, scaled_codes, to_codes
from sparse_kvcm import ResolveOutputs
from sparse_kvcm.models import DeepSeekV4Geometry

Overlap = Literal["none", "side", "followers", "layers", "halves", "hits"]
OVERLAPS: dict[Overlap, str] = {
    "none": "everything on one stream",
    "side": "a group's fetch beside the projections of its leader",
    "followers": "the leader's part of a fetch, then its followers' while it computes",
    "layers": "each layer's part of a fetch by itself, beside the layers before it",
    "halves": "two halves of the batch, one computes while the other fetches",
    "hits": "attention over hits beside the fetch, then over misses; merged",
}


@dataclass
class Part:
    """Rows of a step that run together: views of the step's inputs, and what they make."""

    rows: torch.Tensor
    tokens: torch.Tensor
    ids: torch.Tensor
    selection: torch.Tensor
    misses: torch.Tensor
    scores: torch.Tensor
    best: torch.Tensor
    outs: list[ResolveOutputs]
    places: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: torch.Tensor | None = None
    split: tuple[torch.Tensor, torch.Tensor] | None = None  # slots of hits, and of misses
    ready: dict[int, torch.cuda.Event] = field(default_factory=dict)


class Forward:
    """A step of `bucket` rows on fixed addresses.

    Attributes
    ----------
    rows, tokens : torch.Tensor, int32, shape (bucket,)
        Rows of the Batch and lengths after the step; padding is -1 and 0.
    ids : torch.Tensor, int64, shape (bucket,)
        Tokens.
    selection : torch.Tensor, int32, shape (groups, bucket, k)
    misses : torch.Tensor, int32, shape (groups, bucket)
        Counted up by every step.
    kept : list of list of torch.Tensor, optional
        If it is one, attention outputs are put there, by layer and part.
    """

    def __init__(
        self, cache: SliceCache, weights: Weights, bucket: int, overlap: Overlap = "none"
    ) -> None:
        model, device = cache.model, cache.device
        self._model, self._cache, self._weights, self._overlap = model, cache, weights, overlap
        self._attention = Attention(model)
        self._group_of = model.geometry.selection_group_of
        groups, k = len(model.geometry.groups), model.geometry.top_k
        self.rows = torch.full((bucket,), -1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(bucket, dtype=torch.int32, device=device)
        self.ids = torch.zeros(bucket, dtype=torch.int64, device=device)
        self.selection = torch.full((groups, bucket, k), -1, dtype=torch.int32, device=device)
        self.misses = torch.zeros((groups, bucket), dtype=torch.int32, device=device)
        self.kept: list[list[torch.Tensor]] | None = None
        self.output = torch.empty(0)
        units = cache.sizes.max_units
        self._scores = torch.full((bucket, units), -torch.inf, device=device)
        self._best = torch.empty((bucket, k), dtype=torch.int32, device=device)
        self._flags = torch.zeros(1, dtype=torch.bool, device=device)
        if overlap == "hits" and cache.offloaded:
            slots = max(one.pages.shape[0] * one.units for one in cache.units.values())
            self._flags = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        half = -(-bucket // 2)
        bounds = [0, half, bucket] if overlap == "halves" and bucket > 1 else [0, bucket]
        self.parts = [self._part(*ends) for ends in pairwise(bounds)]
        self._side = None
        if device != "cpu" and cache.offloaded and overlap != "none":
            self._side = torch.cuda.Stream(device, priority=-1)

    def run(self, clock: Clock) -> None:
        """Launch the step. The cache's step is open."""
        clock.begin()
        outputs: list[torch.Tensor] = []
        running = [self._run(part, clock, outputs) for part in self.parts]
        while running:
            running = [one for one in running if next(one, self) is not self]
        self.output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        clock.mark("rest")

    # --- a part ---

    def _part(self, begin: int, end: int) -> Part:
        geometry = self._model.geometry
        rows = self.rows[begin:end]
        return Part(
            rows,
            self.tokens[begin:end],
            self.ids[begin:end],
            self.selection[:, begin:end],
            self.misses[:, begin:end],
            self._scores[begin:end],
            self._best[begin:end],
            [ResolveOutputs.empty(end - begin, geometry.top_k, 1, like=rows)
             for _ in geometry.groups],
        )  # fmt: skip

    def _run(self, part: Part, clock: Clock, outputs: list[torch.Tensor]) -> Iterator[None]:
        self._find_places(part)
        x = self._weights.embedding[part.ids]
        for layer, weights in enumerate(self._weights.layers):
            h = normal(x)
            low = normal(h @ weights["q_a"])
            if self._model.geometry.owns_indexer(layer):
                clock.mark("rest")
                self._index(part, layer, weights, h, low)
                clock.mark("indexer")
                self._select(part, layer, clock)
                yield
            q = self._queries(weights, low)
            self._write(part, layer, weights, h)
            clock.mark("rest")
            attended = self._attend(part, layer, q, clock)
            if self.kept is not None:
                self.kept[layer].append(attended.clone())
            x = x + self._project(weights, attended)
            h = normal(x)
            clock.mark("rest")
            assert weights.experts is not None
            routed = weights.experts(h, weights["router"], self._model.experts_per_token)
            clock.mark("experts")
            gate, up = (h @ weights["shared_up"]).chunk(2, -1)
            x = x + routed + (silu(gate) * up) @ weights["shared_down"]
        outputs.append(x)

    def _find_places(self, part: Part) -> None:
        """Lengths in units, and slots in pools that all layers share."""
        geometry, cache = self._model.geometry, self._cache
        per_unit = geometry.tokens_per_unit
        units = part.tokens // per_unit
        new = torch.where(part.tokens % per_unit == 0, units - 1, -1)[:, None]
        leader = geometry.groups[0][0]
        part.places = {"units": units, "new": new}
        part.places["index"] = device_ops.look_up(new, cache.index_keys[leader], part.rows)
        if not cache.offloaded:
            part.places["unit"] = device_ops.look_up(new, cache.units[leader], part.rows)
        if not isinstance(geometry, DeepSeekV4Geometry):
            return
        tokens = part.tokens[:, None]
        last = torch.arange(geometry.sliding_window, device=tokens.device, dtype=torch.int32)
        window = (tokens - 1 - last).clamp(min=-1)
        part.places["window"] = device_ops.look_up(window, cache.windows[0], part.rows)
        entries = torch.arange(
            cache.sizes.seq_len // 128 + 1, device=tokens.device, dtype=torch.int32
        )
        entries = torch.where(entries < tokens // 128, entries, -1)
        dense = next(iter(cache.entries128.values()))
        part.places["entries"] = device_ops.look_up(entries, dense, part.rows)
        completed = torch.where(tokens % 128 == 0, tokens // 128 - 1, -1)
        part.places["entry"] = device_ops.look_up(completed, dense, part.rows)

    def _index(
        self, part: Part, layer: int, weights: LayerWeights, h: torch.Tensor, low: torch.Tensor
    ) -> None:
        """Write the new index key, score all of them, and take the best; nobody reads which."""
        one, keys = self._model, self._cache.index_keys[layer]
        width = one.geometry.index_head_dim
        codes, scale = scaled_codes(h @ weights["index_k"])
        slots = part.places["index"][:, 0]
        device_ops.write_units(codes.view(torch.uint8), slots, keys)
        scales = scale[:, None].contiguous().view(torch.uint8)
        device_ops.write_units(scales, slots, keys, offset=keys.units * width)
        queries = (low @ weights["index_q"]).view(-1, one.index_heads, width)
        queries = queries.to(device_ops.FP8)
        head_weights = (h @ weights["index_w"]).float()
        lengths = part.places["units"]
        device_ops.index_scores(queries, head_weights, keys, part.rows, lengths, part.scores)
        device_ops.top_k(part.scores, lengths, part.best)

    def _select(self, part: Part, layer: int, clock: Clock) -> None:
        """Slots of the group's selection; under offload the misses set out for their slots."""
        group, cache = self._group_of[layer], self._cache
        part.ready = {}
        if not cache.offloaded:
            buffer = cache.units[layer]
            part.slots = device_ops.look_up(part.selection[group], buffer, part.rows)
            clock.mark("convert")
            return
        out = part.outs[group]
        cache.batch.resolve(group, part.rows, part.selection[group], out, stream=cache.stream)
        part.slots = out.slots
        part.misses[group].add_(out.miss_counts)
        clock.mark("resolve")
        self._fetch(part, group, out)
        if self._overlap == "hits":
            self._split(part, out)
        clock.mark("convert" if self._side else "fetch")

    def _fetch(self, part: Part, group: int, out: ResolveOutputs) -> None:
        batch, layers = self._cache.batch, self._model.geometry.groups[group]
        if self._side is None:
            batch.fetch(group, part.rows, out, stream=self._cache.stream)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        stream = self._side.cuda_stream
        for some in self._shares(layers):
            batch.fetch(group, part.rows, out, stream=stream, layers=some)
            done = torch.cuda.Event()
            done.record(self._side)
            part.ready |= dict.fromkeys(some, done)

    def _shares(self, layers: tuple[int, ...]) -> list[list[int]]:
        """Layers of a group by what fetches for them, in that order."""
        if self._overlap == "layers":
            return [[layer] for layer in layers]
        if self._overlap == "followers" and len(layers) > 1:
            return [[layers[0]], list(layers[1:])]
        return [list(layers)]

    def _split(self, part: Part, out: ResolveOutputs) -> None:
        """Tell slots of hits from those that a fetch is on the way to."""
        column = torch.arange(out.slots.shape[1], device=out.slots.device)
        missed = column < out.miss_counts[:, None]
        last = len(self._flags) - 1
        targets = torch.where(missed, out.miss_slots, last).long()
        self._flags.index_fill_(0, targets.flatten(), True)
        is_miss = self._flags[out.slots.long()]  # -1 is the last, which tells nothing
        self._flags.index_fill_(0, targets.flatten(), False)
        hits = torch.where(is_miss, -1, out.slots)
        part.split = hits, torch.where(missed, out.miss_slots, -1)

    # --- a layer ---

    def _queries(self, weights: LayerWeights, low: torch.Tensor) -> torch.Tensor:
        """Absorbed queries, bfloat16 ``[b, heads, width]``."""
        one = self._model
        q = (low @ weights["q_b"]).view(len(low), one.heads, -1)
        if not one.nope:
            return normal(q)
        nope, rope = q.split([one.nope, q.shape[-1] - one.nope], -1)
        latent = torch.bmm(nope.transpose(0, 1), weights["key_up"]).transpose(0, 1)
        return torch.cat([latent, rope], -1)

    def _write(self, part: Part, layer: int, weights: LayerWeights, h: torch.Tensor) -> None:
        """Write what the layer adds for the new token."""
        cache, geometry = self._cache, self._model.geometry
        record = to_codes(normal(h @ weights["kv"]))
        if isinstance(geometry, DeepSeekV4Geometry):
            newest = part.places["window"][:, 0]
            device_ops.write_units(record, newest, cache.windows[layer])
            record = to_codes(normal(h @ weights["compress"]))
            if layer in cache.entries128:
                entry = part.places["entry"][:, 0]
                device_ops.write_units(record, entry, cache.entries128[layer])
                return
        if cache.offloaded:
            slots = part.outs[self._group_of[layer]].write_slots[:, 0]
        else:
            slots = part.places["unit"][:, 0]
        device_ops.write_units(record, slots, cache.units[layer])

    def _attend(self, part: Part, layer: int, q: torch.Tensor, clock: Clock) -> torch.Tensor:
        cache = self._cache
        window: tuple[Buffer, torch.Tensor] | None = None
        if layer in cache.windows:
            window = cache.windows[layer], part.places["window"]
        if layer in cache.entries128:
            out = self._attention(q, cache.entries128[layer], part.places["entries"], window)
            clock.mark("attention")
            return out
        units, slots = cache.units[layer], part.slots
        assert slots is not None
        if self._overlap == "hits" and part.split is not None:
            hits = self._attention.with_sums(q, units, part.split[0], window)
            clock.mark("attention")
            self._wait(part, layer)
            clock.mark("fetch")
            out = merge(hits, self._attention.with_sums(q, units, part.split[1]))
        else:
            self._wait(part, layer)
            clock.mark("fetch")
            out = self._attention(q, units, slots, window)
        clock.mark("attention")
        return out

    def _wait(self, part: Part, layer: int) -> None:
        if layer in part.ready:
            torch.cuda.current_stream().wait_event(part.ready[layer])

    def _project(self, weights: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """Back to the hidden size."""
        one, b = self._model, len(attended)
        if one.nope:
            values = torch.bmm(attended.transpose(0, 1), weights["value_up"])
            return values.transpose(0, 1).reshape(b, -1) @ weights["out"]
        grouped = attended.reshape(b, one.o_groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, weights["out_a"]).transpose(0, 1).reshape(b, -1)
        return low @ weights["out"]
