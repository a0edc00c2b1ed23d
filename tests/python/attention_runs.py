"""Two managers of a model, resident and offloaded, whose layers attend to the same selections.

Both get the same requests, selections, tokens and queries. The offloaded one may be spoilt, to see
that the comparison notices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import dsa_cases
import mla_cases
import v4_cases
from sparse_kvcm.attention import attention_base, step_rows, write_step
from sparse_kvcm.attention.mla_tuning import Tuning
from sparse_kvcm.attention.sparse_mla import KeyPart, sparse_mla_decode
from sparse_kvcm.deepseek_v4 import DeepseekV4History
from sparse_kvcm.dsa import DSACacheManagerV2
from sparse_kvcm.models import AttentionType
from sparse_kvcm.step import StepRequest

HEADS, ROWS = 2, 3
INTERPRETED = Tuning(64, 4, 2, 2)  # few programs, which take their time, and rows that are cut
SWA, C, INDEX = v4_cases.SWA, v4_cases.C, v4_cases.INDEX
Spoil = Callable[["Side", int, Any], Any]


def keep(side: Side, layer: int, rows: Any) -> Any:
    del side, layer
    return rows


class Side:
    """One manager: what its forward runs, eagerly or as a graph.

    `spoil` gets the rows of each layer before its attention, and may change them or the pages.
    """

    def __init__(self, manager: Any, run: Any, spoil: Spoil = keep) -> None:
        self.manager, self.run, self.spoil = manager, run, spoil
        self.graph: Any = None
        self.outputs: dict[int, Any] = {}

    def step(self, requests: list[tuple[int, int]], eager: bool) -> list[tuple[int, int]]:
        """One step; the order in which requests ran."""
        made = [StepRequest(one, history) for one, history in requests]
        prepared = self.manager.prepare_step(made, padded_size=ROWS).prepared
        order = [(one.request_id, one.history) for one in prepared.requests]
        self.run.fill(order)
        if eager:
            self.outputs = self.run.forward(self)
        elif self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.run.forward(self)
            self.graph.replay()
        else:
            self.graph.replay()
        return order


class DsaRun:
    """Six layers in three selection groups; tokens are `dsa_cases.latents`."""

    most, prompts = 200, (30, 120)

    def __init__(self, kv_dtype: str, device: str, spoil: Spoil = keep) -> None:
        options: dict[str, Any] = {
            "kv_dtype": kv_dtype, "device": device, "kv_scale": mla_cases.KV_SCALE,
        }  # fmt: skip
        config = dsa_cases.cache_config(**options)
        offload = dsa_cases.cache_config(**options, offload=dsa_cases.offload_sizes(config))
        resident = DSACacheManagerV2(dsa_cases.cache_config(**options))
        self.model, self.device = config.geometry, device
        self.sides = [Side(resident, self), Side(DSACacheManagerV2(offload), self, spoil)]
        width = dsa_cases.RANK + dsa_cases.ROPE
        self.scale = width**-0.5
        self.layers = list(self.model.history_layers)
        self.selections = [full_selection(dsa_cases.TOP_K, device) for _ in self.model.groups]
        self.new = {layer: torch.zeros(ROWS, width, device=device) for layer in self.layers}
        self.q = queries(self.layers, width, device)
        self.rng = np.random.default_rng(5)
        self.filled: list[tuple[int, int]] = []

    def add(self, manager: Any, request: int, prompt: int) -> None:
        manager.add_request(request, self.most)
        parts = dsa_cases.history(self.model, request, 0, prompt)
        on_device = [{i: one.to(self.device) for i, one in part.items()} for part in parts]
        manager.import_history(request, *on_device)

    def fill(self, order: list[tuple[int, int]]) -> None:
        """Inputs of a step, once for both sides."""
        if order == self.filled:
            return
        self.filled = order
        for selection in self.selections:
            chosen = choose(self.rng, dsa_cases.TOP_K, [history + 1 for _, history in order])
            selection.copy_(torch.from_numpy(chosen))
        for layer in self.layers:
            for row, (request, history) in enumerate(order):
                self.new[layer][row] = dsa_cases.latents(request, layer, [history])[0]
            self.q[layer].copy_(random_queries(self.rng, self.q[layer].shape))

    def forward(self, side: Side) -> dict[int, Any]:
        manager, outputs = side.manager, {}
        for group, selection in zip(self.model.groups, self.selections, strict=True):
            slots = manager.select(group[0], selection)
            for layer in group:
                write_step(manager, layer, self.new[layer])
                base = attention_base(manager, layer)
                rows = side.spoil(side, layer, step_rows(manager, layer, slots).rows)
                outputs[layer] = sparse_mla_decode(
                    self.q[layer], base.buffers, rows, layout=base.layout,
                    softmax_scale=self.scale, kv_scale=mla_cases.KV_SCALE,
                    tuning=tuning_on(self.device),
                )  # fmt: skip
        return outputs

    def expected(self, layer: int, row: int) -> Any:
        """Float64 outputs of one row."""
        request, _ = self.filled[row]
        group = self.model.selection_group_of[layer]
        chosen = self.selections[group][row].cpu()
        units = dsa_cases.latents(request, layer, chosen[chosen >= 0].tolist())
        layout = attention_base(self.sides[0].manager, layer).layout
        return reference(self, layer, row, [(layout, units)], None)


class V4Run:
    """Five layers, ratios 0, 4, 128, 4, 128; scales of items differ, so that a footer tells."""

    most, prompts = 900, (290, 440)

    def __init__(self, kv_dtype: str, device: str, spoil: Spoil = keep) -> None:
        model = v4_cases.geometry(head_dim=256, qk_rope_head_dim=64)
        options: dict[str, Any] = {
            "kv_dtype": kv_dtype, "device": device, "kv_scale": mla_cases.KV_SCALE,
            "geometry": model, "max_batch_size": ROWS, "gpu_quota": 32 * v4_cases.MIB,
        }  # fmt: skip
        self.model, self.device = model, device
        made = [v4_cases.manager(offloads, **options) for offloads in (False, True)]
        self.sides = [Side(made[0], self), Side(made[1], self, spoil)]
        self.scale = model.head_dim**-0.5
        self.layers = list(range(len(model.compress_ratios)))
        self.selected = [i for i, ratio in enumerate(model.compress_ratios) if ratio == 4]
        self.selections = {i: full_selection(v4_cases.TOP_K, device) for i in self.selected}
        width = model.head_dim
        self.new = {
            (layer, kind): torch.zeros(ROWS, width, device=device)
            for layer in self.layers
            for kind in (SWA, C)
        }
        self.q = queries(self.layers, width, device)
        self.sinks = torch.linspace(-1, 1, HEADS, device=device)
        self.rng = np.random.default_rng(6)
        self.filled: list[tuple[int, int]] = []

    def items(self, request: int, layer: int, kind: AttentionType, items: Any) -> torch.Tensor:
        sizes = torch.tensor([2.0 ** (int(i) % 7 - 3) for i in items])
        values = v4_cases.values(self.model, request, layer, kind, items) / 16
        return values * sizes[:, None]

    def add(self, manager: Any, request: int, prompt: int) -> None:
        manager.add_request(request, self.most)
        items = {}
        for layer, ratio in enumerate(self.model.compress_ratios):
            for kind in v4_cases.kinds_of(ratio):
                count = prompt // ratio if kind in (C, INDEX) else prompt
                newest = range(count if kind in (C, INDEX) else min(count, 128))
                values = self.items if kind in (SWA, C) else partial(v4_cases.values, self.model)
                items[layer, kind] = values(
                    request, layer, kind, [count - 1 - i for i in newest[::-1]]
                )
        made = DeepseekV4History(prompt, items)
        manager.import_history(request, made)

    def fill(self, order: list[tuple[int, int]]) -> None:
        """Inputs of a step, once for both sides."""
        if order == self.filled:
            return
        self.filled = order
        lengths = [history + 1 for _, history in order]
        for selection in self.selections.values():
            chosen = choose(self.rng, v4_cases.TOP_K, [n // 4 for n in lengths])
            selection.copy_(torch.from_numpy(chosen))
        for layer, ratio in enumerate(self.model.compress_ratios):
            for row, (request, history) in enumerate(order):
                self.new[layer, SWA][row] = self.items(request, layer, SWA, [history])[0]
                if ratio and (history + 1) % ratio == 0:
                    item = (history + 1) // ratio - 1
                    self.new[layer, C][row] = self.items(request, layer, C, [item])[0]
            self.q[layer].copy_(random_queries(self.rng, self.q[layer].shape))

    def forward(self, side: Side) -> dict[int, Any]:
        manager, outputs = side.manager, {}
        for layer, ratio in enumerate(self.model.compress_ratios):
            write_step(manager, layer, self.new[layer, SWA], kind=SWA)
            slots = manager.select(layer, self.selections[layer]) if ratio == 4 else None
            if ratio:
                write_step(manager, layer, self.new[layer, C])
            rows = step_rows(manager, layer, slots)
            window = attention_base(manager, layer, SWA)
            part = KeyPart(window.buffers, rows.window, window.layout, mla_cases.KV_SCALE)
            options: dict[str, Any] = {
                "softmax_scale": self.scale, "sinks": self.sinks, "tuning": tuning_on(self.device),
            }  # fmt: skip
            if not ratio:
                outputs[layer] = sparse_mla_decode(
                    self.q[layer], part.pool, part.rows, layout=part.layout,
                    kv_scale=part.kv_scale, **options,
                )  # fmt: skip
                continue
            base = attention_base(manager, layer)
            compressed = side.spoil(side, layer, rows.compressed)
            outputs[layer] = sparse_mla_decode(
                self.q[layer], base.buffers, compressed, layout=base.layout, window=part,
                kv_scale=mla_cases.KV_SCALE, **options,
            )  # fmt: skip
        return outputs

    def expected(self, layer: int, row: int) -> Any:
        """Float64 outputs of one row."""
        request, history = self.filled[row]
        n, ratio = history + 1, self.model.compress_ratios[layer]
        manager = self.sides[0].manager
        tokens = range(max(0, n - v4_cases.WINDOW), n)
        parts = [
            (attention_base(manager, layer, SWA).layout, self.items(request, layer, SWA, tokens))
        ]
        if ratio:
            chosen = list(range(n // ratio))
            if ratio == 4:
                selection = self.selections[layer][row]
                chosen = selection[selection >= 0].tolist()
            units = self.items(request, layer, C, chosen)
            parts.append((attention_base(manager, layer).layout, units))
        return reference(self, layer, row, parts, self.sinks.cpu())


def tuning_on(device: str) -> Tuning | None:
    return INTERPRETED if device == "cpu" else None


def full_selection(top_k: int, device: str) -> torch.Tensor:
    return torch.full((ROWS, top_k), -1, dtype=torch.int32, device=device)


def queries(layers: list[int], width: int, device: str) -> dict[int, torch.Tensor]:
    return {i: torch.zeros(ROWS, HEADS, width, dtype=torch.bfloat16, device=device) for i in layers}


def random_queries(rng: np.random.Generator, shape: Any) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(tuple(shape), np.float32))


def choose(rng: np.random.Generator, top_k: int, units: list[int]) -> np.ndarray:
    """Distinct units of each row, the newest among them, -1 anywhere; rows of padding have none."""
    chosen = np.full((ROWS, top_k), -1, np.int32)
    for row, count in zip(chosen, units, strict=False):
        some = rng.choice(count, min(top_k - 3, count), replace=False)
        if len(some) and count - 1 not in some:
            some[0] = count - 1
        row[rng.permutation(top_k)[: len(some)]] = some
    return chosen


def reference(run: Any, layer: int, row: int, parts: list[Any], sinks: Any) -> Any:
    """Attention in float64 to units that are quantised as their layouts say; and the largest."""
    pools = []
    for layout, units in parts:
        exact = mla_cases.decode(layout, mla_cases.encode(layout, units))
        rounded = mla_cases.operands(layout, exact)
        made = mla_cases.Pool(layout, [], torch.arange(len(units)), rounded, exact)
        pools.append((made, torch.arange(len(units))[None]))
    want = mla_cases.attend(run.q[layer][row : row + 1].cpu(), pools, run.scale, sinks)
    return want, max(float(one.elements.abs().max()) for one, _ in pools)


class Scenario:
    """Requests join, leave and reach their end; after each step outputs must be the same bits."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lengths: dict[int, int] = {}
        self.rng = np.random.default_rng(11)
        self.next = 1

    def join(self) -> None:
        prompt = int(self.rng.integers(*self.run.prompts))
        for side in self.run.sides:
            self.run.add(side.manager, self.next, prompt)
        self.lengths[self.next] = prompt
        self.next += 1

    def leave(self, request: int) -> None:
        for side in self.run.sides:
            side.manager.free_request(request)
        del self.lengths[request]

    def go(self, steps: int, *, graph: bool = False, turn: int = 7, check_every: int = 1) -> None:
        for step in range(steps):
            if step % turn == turn - 1:
                self.leave(min(self.lengths))
            for request in [i for i, n in self.lengths.items() if n + 1 >= self.run.most]:
                self.leave(request)
            while len(self.lengths) < (ROWS if step % turn < turn // 2 else ROWS - 1):
                self.join()
            orders = [
                side.step(list(self.lengths.items()), eager=not graph or step < 2)
                for side in self.run.sides
            ]
            assert orders[0] == orders[1]
            self.compare(step)
            if step % check_every == 0:
                self.check(self.run.layers[step // check_every % len(self.run.layers)])
            for side in self.run.sides:
                side.manager.end_step()
            self.lengths = {i: n + 1 for i, n in self.lengths.items()}

    def compare(self, step: int) -> None:
        resident, offloaded = (side.outputs for side in self.run.sides)
        for layer in self.run.layers:
            for name, one, other in zip(
                ("out", "lse"), resident[layer], offloaded[layer], strict=True
            ):
                assert torch.equal(one, other), f"step {step}, layer {layer}: {name} differs"
            assert not resident[layer][0][len(self.lengths) :].any(), "padding has outputs"

    def check(self, layer: int) -> None:
        """Against float64, lest both be wrong alike."""
        outputs = self.run.sides[1].outputs[layer]
        for row in range(len(self.lengths)):
            want, largest = self.run.expected(layer, row)
            out, lse = (one[row : row + 1].cpu() for one in outputs)
            bound = 2 * mla_cases.BF16_ROUNDING * largest  # of weights, and of the output
            torch.testing.assert_close(out.double(), want[0], rtol=2**-8, atol=bound)
            torch.testing.assert_close(lse.double(), want[1], rtol=2**-14, atol=2**-10)
