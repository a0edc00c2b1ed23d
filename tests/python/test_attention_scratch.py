"""The scratch of NVFP4: selected units side by side, zeros wherever there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import attention_cases as cases  # noqa: E402
from sparse_kvcm.attention import KvScratch, write_latents  # noqa: E402


def random_pages(layout: Any, rng: Any, pages: int = 3) -> np.ndarray:
    made = rng.integers(1, 256, (pages, layout.page.page_bytes))
    return np.asarray(made, np.uint8)


def unit(layout: Any, pages: np.ndarray, slot: int) -> list[np.ndarray]:
    units = layout.units_per_page
    return [
        pages[slot // units, begin + slot % units * size :][:size]
        for begin, size in layout.page.regions
    ]


@pytest.mark.parametrize(("b", "k"), [(1, 1), (2, 63), (2, 64), (1, 129), (3, 43)])
@pytest.mark.parametrize("name", ["dsa/nvfp4", "dsa/nvfp4_ds_mla", "v4/nvfp4", "v4/fp8_ds_mla"])
def test_units_lie_side_by_side_and_zeros_behind_them(
    name: str, b: int, k: int, triton_device: str
) -> None:
    """Zero to the end of the last tile and one tile more, whatever a larger step has left."""
    layout, rng = cases.layout_of(name), np.random.default_rng(b * k)
    pages = random_pages(layout, rng)
    scratch = KvScratch(layout, 3, 129, triton_device)
    scratch.memory.fill_(cases.POISON)
    slots = rng.integers(-1, 3 * 64 + 1, (b, k))
    arena = torch.from_numpy(pages).to(triton_device)
    scratch.fill([arena], torch.from_numpy(slots).to(triton_device, torch.int32))

    tiles = -(-b * k // 128) * 128 + 128
    found = scratch.memory.cpu().numpy()
    for region, (begin, size) in enumerate(scratch.layout.page.regions):
        wanted = np.full((scratch.layout.units_per_page, size), cases.POISON, np.uint8)
        wanted[:tiles] = 0
        for i, slot in enumerate(slots.ravel()):
            if 0 <= slot < 3 * 64:
                wanted[i] = unit(layout, pages, int(slot))[region]
        got = found[0, begin : begin + wanted.size].reshape(wanted.shape)
        np.testing.assert_array_equal(got, wanted)


def test_a_row_of_the_scratch_is_a_slot_of_its_layout(triton_device: str) -> None:
    """So that what reads an arena reads a scratch."""
    layout = cases.layout_of("dsa/nvfp4")
    rows = cases.hard_rows(layout, seed=2)
    arena = torch.zeros(1, layout.page.page_bytes, dtype=torch.uint8, device=triton_device)
    slots = torch.arange(len(rows), device=triton_device)
    write_latents(layout, [arena], rows.to(triton_device), slots)
    scratch = KvScratch(layout, 2, 6, triton_device)
    scratch.fill([arena], slots.flip(0).view(2, 6))
    written = KvScratch(layout, 2, 6, triton_device)
    write_latents(written.layout, [written.memory], rows.flip(0).to(triton_device), slots)
    assert torch.equal(scratch.memory, written.memory)


def test_its_bytes_are_those_of_whole_tiles_and_one_more() -> None:
    layout = cases.layout_of("dsa/nvfp4")
    assert KvScratch(layout, 5, 2048, "cpu").memory.shape == (1, (5 * 2048 + 128) * 324)
    assert KvScratch(layout, 3, 50, "cpu").memory.shape == (1, (256 + 128) * 324)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.zeros((3, 4), dtype=torch.int32), "at most"),
        (torch.zeros((2, 5), dtype=torch.int32), "at most"),
        (torch.zeros((2, 4)), "int32 or int64"),
        (torch.zeros(4, dtype=torch.int32), "shape"),
        (torch.zeros((4, 2), dtype=torch.int32).T, "contiguous rows"),
        ([[1]], "torch.Tensor"),
    ],
)
def test_slots_that_do_not_fit_are_refused(slots: Any, message: str) -> None:
    layout = cases.layout_of("dsa/nvfp4")
    scratch = KvScratch(layout, 2, 4, "cpu")
    arena = torch.zeros(1, layout.page.page_bytes, dtype=torch.uint8)
    with pytest.raises(kvcm.InvalidArgument, match=message):
        scratch.fill([arena], slots)
