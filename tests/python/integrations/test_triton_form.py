"""Form "triton": decode attention over rows where they lie, the same bits resident and offloaded.

Models and the program of requests are those of the demonstration, `python/examples/attention.py`.
"""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import functools
import importlib
import os
import pathlib
import sys

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("rich")

from rich.progress import Progress

from sparse_kvcm.adapter.batch_store import BatchStore
from sparse_kvcm.attention import AttentionBase, attention_base, step_rows
from sparse_kvcm.integrations.transformers import StepDriver, absorbed
from sparse_kvcm.integrations.transformers.deepseek_v4 import attention as v4_attention
from sparse_kvcm.integrations.transformers.deepseek_v4 import layers as v4_layers
from sparse_kvcm.models import AttentionType

EXAMPLES = pathlib.Path(__file__).parents[3] / "python" / "examples"
SWA, COMPRESS = AttentionType.SWA, AttentionType.COMPRESS
# One ends an entry of ratio 128 with its first token, one is short, two are longer than a lease.
LENGTHS = (127, 20, 290, 270)
NEW_TOKENS = 3
LAYERS = {"glm5": 4, "v4": 3}
MODULES = {"glm5": absorbed, "v4": v4_attention}
WRITES = [
    *(
        (one, "update")
        for one in (v4_layers.ManagedWindow, v4_layers.ManagedHCA, v4_layers.ManagedCSA)
    ),
    *((one, "update_compressor_states") for one in (v4_layers.ManagedHCA, v4_layers.ManagedCSA)),
]
FEW = [("glm5", "fp8_ds_mla"), ("v4", "fp8_ds_mla")]  # under the interpreter
ALL = [
    *(("glm5", one) for one in ("fp8_ds_mla", "bf16", "fp8", "nvfp4", "nvfp4_ds_mla")),
    *(("v4", one) for one in ("fp8_ds_mla", "bf16", "fp8", "nvfp4")),
]


@pytest.fixture
def demo(monkeypatch, device):
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton is compiled here")
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("attention")
    monkeypatch.setattr(module, "PROMPT_LENGTHS", LENGTHS)
    if device == "cpu":  # the interpreter takes its time
        for name, model in module.MODELS.items():
            monkeypatch.setattr(model, "kinds", model.kinds[: LAYERS[name]])
    return module


class DiffersError(Exception):
    """A token whose logits are not those of the resident run."""


class EnoughError(Exception):
    """So many forwards as were asked for."""


def run(demo, name, kv_dtype, device, offloads, expected=None, forwards=None):
    """Decode; with the logits of a run at hand it ends at the first that are others."""
    left = [forwards]

    class Watched(demo.Run):
        def sample(self, logits, requests):
            tokens = super().sample(logits, requests)
            for i, got in enumerate(self.logits if expected else []):
                if not torch.equal(got[-1], expected.logits[i][len(got) - 1]):
                    raise DiffersError(f"request {i}, token {len(got) - 1}")
            if left[0] is not None:
                left[0] -= 1
                if not left[0]:
                    raise EnoughError
            return tokens

    what = (demo.MODELS[name], device, kv_dtype, NEW_TOKENS, offloads, Progress(disable=True))
    return demo.decode(Watched(), *what)


@functools.cache
def resident(demo, name, kv_dtype, device):
    """The run that others are compared with; what its layers write and attend to is checked."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, method in WRITES:
            patch.setattr(kind, method, noted(getattr(kind, method), method))
        patch.setattr(MODULES[name], "attend", CHECKED[name](MODULES[name].attend))
        return run(demo, name, kv_dtype, device, offloads=False)


def near(got, want, message, bound=2**-6):
    """Of BF16 queries, weights and outputs, each off by 2^-9 of itself at most, and their sums."""
    off = (got.float() - want.float()).norm() / want.float().norm()
    assert off < bound, f"{message}: {off:.2%} off"


def written(manager, layer, kind, rows, want):
    """What the step wrote is what it was given, but for the record's rounding: E2M1's is 1/4."""
    got = manager.gather_latents(layer, rows) if kind is None else manager.read(layer, kind, rows)
    near(got, want, f"layer {layer}, what was written", 1 / 4)


def noted(method, name):
    """A cache layer's call that also keeps what it got: new keys, or entries of a compressor."""

    def call(self, *args, **options):
        if args[0] != "indexer":
            self.__dict__.setdefault("noted", {})[name] = args
        return method(self, *args, **options)

    return call


def softmax(scores, exists, sinks=None):
    scores = scores.masked_fill(~exists[:, None], -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.float()[None, :, None].expand(len(scores), -1, 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def checked_dsa(attend):
    """Keys and values expanded as the stock model does, of what the manager reads at the slots."""

    def checked(manager, module, layer, query, latents, slots, scaling):
        output = attend(manager, module, layer, query, latents, slots, scaling)
        group = manager.config.geometry.selection_group_of[layer]
        written(manager, layer, None, manager.latents.write_slots(manager.step, group), latents)
        units, rank = manager.gather_latents(layer, slots), module.kv_lora_rank
        expand = module.kv_b_proj.weight.float().view(module.num_heads, -1, rank)
        both = torch.einsum("bkr,hdr->bhkd", units[..., :rank], expand)
        keys, values = both.split([module.qk_nope_head_dim, module.v_head_dim], -1)
        rotary = units[:, None, :, rank:].expand(-1, module.num_heads, -1, -1)
        scores = torch.einsum(
            "bhd,bhkd->bhk", query[:, :, 0].float(), torch.cat([keys, rotary], -1)
        )
        weights = softmax(scores * scaling, slots >= 0)
        near(output[:, 0], torch.einsum("bhk,bhkd->bhd", weights, values), f"layer {layer}")
        return output

    return checked


def checked_v4(attend):
    """Window and entries as the manager reads them."""

    def checked(state, module, query, scaling):
        layer, manager, at = module.layer_idx, state.manager, state.at
        rows = {SWA: manager.rows(layer, SWA, at)}
        if layer in state.slots:
            rows[COMPRESS] = state.slots[layer]
        elif module.compressor is not None:
            rows[COMPRESS] = manager.rows(layer, COMPRESS, at)
        output = attend(state, module, query, scaling)
        new, length = state._layers[layer].noted, state.length + 1
        newest = rows[SWA][:, min(length, rows[SWA].shape[1]) - 1]
        written(manager, layer, SWA, newest, new["update"][0][:, 0, 0])
        entry = new["update_compressor_states"][1] if COMPRESS in rows else query[:, :0]
        if entry.shape[1]:
            count = length // manager.config.geometry.compress_ratios[layer]
            newest = manager.rows(layer, COMPRESS, at, count)[:, -1]
            written(manager, layer, COMPRESS, newest, entry[:, 0])
        units = torch.cat([manager.read(layer, kind, one) for kind, one in rows.items()], 1)
        exists = torch.cat([one >= 0 for one in rows.values()], 1)
        scores = torch.einsum("bhd,bkd->bhk", query[:, :, 0].float(), units) * scaling
        weights = softmax(scores, exists, module.sinks)
        near(output[:, 0], torch.einsum("bhk,bkd->bhd", weights, units), f"layer {layer}")
        return output

    return checked


CHECKED = {"glm5": checked_dsa, "v4": checked_v4}


@pytest.mark.parametrize(("name", "kv_dtype"), ALL)
def test_offloaded_tokens_are_the_resident_ones(demo, device, name, kv_dtype):
    if device == "cpu" and (name, kv_dtype) not in FEW:
        pytest.skip("a type of records for each model under the interpreter")
    expected = resident(demo, name, kv_dtype, device)
    offloaded = run(demo, name, kv_dtype, device, offloads=True, expected=expected)
    assert offloaded.tokens == expected.tokens
    assert all(len(one) == NEW_TOKENS for one in offloaded.tokens)
    assert offloaded.misses > 0


def poisoned(decode):
    """Attention to copies of pages in which every byte is a NaN's but those that rows name."""

    def spoil(base: AttentionBase, rows):
        regions = base.layout.regions(base.buffers)
        copies = [torch.full_like(one, 0xFF) for one in base.buffers]
        chosen = rows[rows >= 0].long().unique()
        for source, target in zip(regions, base.layout.regions(copies), strict=True):
            units = base.layout.units_per_page
            place = source.offset + chosen % units * source.unit_bytes
            bytes_ = place[:, None] + torch.arange(source.unit_bytes, device=rows.device)
            pages = (chosen // units)[:, None]
            target.pages[pages, bytes_] = source.pages[pages, bytes_]
        return copies

    def poison(q, pool, rows, *, layout, **options):
        copies = spoil(AttentionBase(layout, tuple(pool), True), rows)
        return decode(q, copies, rows, layout=layout, **options)

    return poison


@pytest.mark.parametrize(("name", "kv_dtype"), FEW)
def test_poison_in_every_slot_that_is_not_selected_changes_nothing(
    demo, device, monkeypatch, name, kv_dtype
):
    expected = resident(demo, name, kv_dtype, device)
    module = MODULES[name]
    monkeypatch.setattr(module, "sparse_mla_decode", poisoned(module.sparse_mla_decode))
    with pytest.raises(EnoughError):
        run(demo, name, kv_dtype, device, offloads=True, expected=expected, forwards=6)


def test_a_follower_layer_that_is_not_fetched_is_noticed(demo, device, monkeypatch):
    """Of group 1, which has layers 1 to 3, or 1 to 4."""
    followers = range(2, len(demo.MODELS["glm5"].kinds) - 1)

    def select(self, group, rows, selection):
        out = self.batch.resolve(group, rows, selection, stream=self._stream)
        layers = [1, *followers] if group == 1 else None
        self.batch.fetch(group, rows, out, stream=self._stream, layers=layers)
        return out

    expected = resident(demo, *FEW[0], device)
    monkeypatch.setattr(BatchStore, "select", select)
    with pytest.raises(DiffersError):
        run(demo, *FEW[0], device, offloads=True, expected=expected)


@pytest.mark.parametrize(("name", "kv_dtype"), FEW)
def test_a_row_of_another_unit_is_noticed(demo, device, monkeypatch, name, kv_dtype):
    """As of a step before: of one layer, one row for another that is there too."""
    spoilt = []

    def stale(manager, layer, slots=None, **options):
        found = step_rows(manager, layer, slots, **options)
        if layer == 1 and found.compressed.shape[1] > 1 and not spoilt:
            compressed = found.compressed[0]
            real = (compressed >= 0).nonzero()[:, 0]
            if len(real) > 1:
                compressed[real[0]] = compressed[real[1]]
                spoilt.append(True)
        return found

    expected = resident(demo, name, kv_dtype, device)
    monkeypatch.setattr(MODULES[name], "step_rows", stale)
    with pytest.raises(DiffersError):
        run(demo, name, kv_dtype, device, offloads=True, expected=expected)
    assert spoilt


def test_footers_that_change_places_are_noticed(demo, device, monkeypatch):
    """Of two selected entries whose scales differ."""
    spoilt = []

    def swap(manager, layer, slots=None, **options):
        found = step_rows(manager, layer, slots, **options)
        if layer == 1 and not spoilt:
            base = attention_base(manager, layer)
            region, units = base.layout.regions(base.buffers)[1], base.layout.units_per_page
            rows = found.compressed[0]
            footers = [
                region.pages[row // units, region.offset + row % units * region.unit_bytes :][
                    : region.unit_bytes
                ]
                for row in rows[rows >= 0].tolist()
            ]
            others = [one for one in footers if not torch.equal(one, footers[0])]
            if others:
                kept = footers[0].clone()
                footers[0].copy_(others[0])
                others[0].copy_(kept)
                spoilt.append(True)
        return found

    expected = resident(demo, *FEW[1], device)
    monkeypatch.setattr(v4_attention, "step_rows", swap)
    with pytest.raises(DiffersError):
        run(demo, *FEW[1], device, offloads=True, expected=expected)
    assert spoilt


def test_what_the_form_cannot_run_on_is_refused(demo, device):
    glm, v4 = demo.MODELS["glm5"], demo.MODELS["v4"]
    with pytest.raises(ValueError, match='manager must be a DsaManager with form "triton"'):
        StepDriver(glm.build("sparse_kvcm", device), max_rows=1, max_length=64, form="triton")
    with glm.driver(device, "bf16", 64, True, None) as driver:
        model = glm.build("sparse_kvcm", device).float()
        with pytest.raises(ValueError, match='model must be bfloat16 with form "triton"'):
            StepDriver(model, max_rows=1, max_length=64, manager=driver.manager, form="triton")
    with v4.driver(device, "bf16", 200, True, None) as driver:
        driver._model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match='must be "sparse_kvcm_v4" with form "triton"'):
            driver.add([1, 2, 3], 2)


def driver_of(demo, name, device):
    with demo.MODELS[name].driver(device, "bf16", 200, True, None) as driver:
        driver.add([1, 2, 3], 2)


@pytest.mark.parametrize("name", ["glm5", "v4"])
def test_without_triton_the_form_is_refused_with_the_extra(demo, name, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"needs triton.*pip install 'sparse_kvcm\[triton\]'"):
        driver_of(demo, name, device)


@pytest.mark.parametrize("name", ["glm5", "v4"])
def test_where_triton_cannot_run_the_form_is_refused(demo, name, monkeypatch):
    triton = importlib.import_module("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match='model, with form "triton", must be on a GPU'):
        driver_of(demo, name, "cpu")
