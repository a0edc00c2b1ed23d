"""Attention gives the same bits resident and offloaded, in every layout, step after step.

On the CPU a few steps under Triton's interpreter; on a GPU 200, of which all but the first two
replay a graph.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import mla_cases  # noqa: E402
from attention_runs import DsaRun, Scenario, V4Run  # noqa: E402
from sparse_kvcm.models import AttentionType  # noqa: E402

RUNS = [
    *((DsaRun, one) for one in ("bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla")),
    *((V4Run, one) for one in ("bf16", "fp8", "fp8_ds_mla", "nvfp4")),
]
FEW = 2


@pytest.mark.parametrize(("kind", "kv_dtype"), RUNS)
def test_offloaded_steps_give_the_bits_of_resident_ones(kind: Any, kv_dtype: str) -> None:
    device = mla_cases.device_or_skip("cpu")
    Scenario(kind(kv_dtype, device)).go(FEW, turn=2)


@pytest.mark.parametrize(("kind", "kv_dtype"), RUNS)
def test_a_replayed_graph_gives_the_bits_of_resident_steps(kind: Any, kv_dtype: str) -> None:
    device = mla_cases.device_or_skip("cuda")
    Scenario(kind(kv_dtype, device)).go(200, graph=True, check_every=20)


class FrozenFollower:
    """A fetch that leaves out a follower layer: its arena stays as it was but for new tokens."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.before: Any = None

    def __call__(self, side: Any, layer: int, rows: Any) -> Any:
        if layer != self.layer:
            return rows
        (arena,) = (one for one, _ in side.manager.latents.buffers(layer))
        if self.before is not None:
            fetched = side.manager.resolved(layer)
            slots = torch.from_dlpack(fetched.miss_slots).flatten()
            counts = torch.from_dlpack(fetched.miss_counts)
            width = len(slots) // len(counts)
            for row, count in enumerate(counts.tolist()):
                for slot in slots[row * width : row * width + count].tolist():
                    restore(arena, self.before, slot, side.manager.config.latent_page)
        self.before = arena.clone()
        return rows


def restore(arena: Any, before: Any, slot: int, page: Any) -> None:
    units = page.tokens_per_block
    for begin, size in page.regions:
        at = begin + slot % units * size
        arena[slot // units, at : at + size] = before[slot // units, at : at + size]


def test_a_follower_layer_that_is_not_fetched_is_noticed() -> None:
    device = mla_cases.device_or_skip("cpu")
    with pytest.raises(AssertionError, match="layer 2: out differs"):
        Scenario(DsaRun("fp8", device, FrozenFollower(2))).go(FEW, turn=99)


@pytest.mark.parametrize(("kind", "layer"), [(DsaRun, 3), (V4Run, 3)])
def test_rows_of_the_step_before_are_noticed(kind: Any, layer: int) -> None:
    """One row of one layer."""
    device = mla_cases.device_or_skip("cpu")
    kept: list[Any] = []

    def stale(side: Any, one: int, rows: Any) -> Any:
        del side
        if one != layer:
            return rows
        kept.append(rows.clone())
        mixed = rows.clone()
        mixed[1] = kept[-2][1] if len(kept) > 1 else rows[1]
        return mixed

    with pytest.raises(AssertionError, match=f"step 1, layer {layer}: out differs"):
        Scenario(kind("fp8", device, stale)).go(FEW, turn=99)


def test_footers_that_change_places_are_noticed() -> None:
    """Of two units whose scales differ."""
    device = mla_cases.device_or_skip("cpu")

    def swap(side: Any, layer: int, rows: Any) -> Any:
        if layer == 1:
            ((arena, page),) = side.manager.access.buffers(layer, AttentionType.COMPRESS)
            units, (begin, size) = page.tokens_per_block, page.regions[1]
            footers = [
                arena[slot // units, begin + slot % units * size :][:size]
                for slot in rows[0][rows[0] >= 0].tolist()
            ]
            one = footers[0]
            other = next(two for two in footers if not torch.equal(one, two))
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        return rows

    with pytest.raises(AssertionError, match="step 0, layer 1: out differs"):
        Scenario(V4Run("fp8_ds_mla", device, swap)).go(1)
