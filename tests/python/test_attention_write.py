"""The write target: bytes of the NumPy codecs, in the units' slots and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import attention_cases as cases  # noqa: E402
import dsa_cases  # noqa: E402
import v4_cases  # noqa: E402
from sparse_kvcm.attention import RecordLayout, dsa_layout, v4_layout, write_latents  # noqa: E402
from sparse_kvcm.dsa import codecs  # noqa: E402

PAGES = 3
# One per row of `hard_rows`: first, last, both sides of a page, none, and what is no slot.
# The first six rows are the hard ones, so all of them have slots.
SLOTS = [5, 64, 63, 17, PAGES * 64 - 1, 0, -1, 127, PAGES * 64, PAGES * 64 + 9, 1, -7]


def wanted_pages(layout: RecordLayout, rows: Any, slots: Any, scale: float) -> np.ndarray:
    pages = cases.poisoned(PAGES, layout.page.page_bytes)
    for slot, row in zip(slots, rows.float().cpu().numpy(), strict=True):
        if 0 <= slot < PAGES * layout.units_per_page:
            cases.put(layout, pages, slot, cases.record(layout, row, scale))
    return pages


def same_pages(found: Any, wanted: np.ndarray) -> None:
    differ = np.argwhere(found.cpu().numpy() != wanted)
    assert not len(differ), f"{len(differ)} bytes differ, first in page, byte {differ[0]}"


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_units_have_the_bytes_of_the_numpy_codec(
    name: str, scale: float, triton_device: str
) -> None:
    layout = cases.layout_of(name)
    rows = cases.hard_rows(layout, seed=3)
    arena = torch.from_numpy(cases.poisoned(PAGES, layout.page.page_bytes)).to(triton_device)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=triton_device)
    write_latents(layout, [arena], rows.to(triton_device), slots, scale=scale)
    same_pages(arena, wanted_pages(layout, rows, SLOTS, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_a_model_s_elements_are_converted_exactly(
    name: str, dtype: Any, triton_device: str
) -> None:
    """The rotary elements apart, as models have them, and rows at a stride."""
    layout = cases.layout_of(name)
    rows = cases.hard_rows(layout, 4, dtype)
    wide = torch.zeros(len(rows), layout.width + 32, dtype=dtype, device=triton_device)
    plain = wide[:, 16 : 16 + layout.width - layout.rope]
    plain.copy_(rows[:, : layout.width - layout.rope])
    rotary = rows[:, layout.width - layout.rope :].contiguous().to(triton_device)
    arena = torch.from_numpy(cases.poisoned(PAGES, layout.page.page_bytes)).to(triton_device)
    slots = torch.tensor([[slot, 0] for slot in SLOTS], device=triton_device)[:, 0]
    write_latents(layout, [arena], plain, slots, rotary=rotary)
    same_pages(arena, wanted_pages(layout, rows, SLOTS, 1.0))


@pytest.mark.parametrize("units", [1, 4, 32])
@pytest.mark.parametrize("kv_dtype", cases.DSA)
def test_other_widths_and_pages_work_too(kv_dtype: Any, units: int, triton_device: str) -> None:
    model = dsa_cases.geometry()
    if kv_dtype == "fp8_ds_mla":
        units = 64
    layout = dsa_layout(model, kv_dtype, units)
    rows = cases.hard_rows(layout, seed=units)[:2]
    slots = [PAGES * units - 1, 0]
    arena = torch.from_numpy(cases.poisoned(PAGES, layout.page.page_bytes)).to(triton_device)
    write_latents(layout, [arena], rows.to(triton_device), torch.tensor(slots).to(triton_device))
    same_pages(arena, wanted_pages(layout, rows, slots, 1.0))


@pytest.mark.parametrize(("head", "rope"), [(64, 16), (256, 64)])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_other_widths_of_entries_work_too(
    kv_dtype: Any, head: int, rope: int, triton_device: str
) -> None:
    layout = v4_layout(v4_cases.geometry(head_dim=head, qk_rope_head_dim=rope), kv_dtype, 8)
    rows, slots = cases.hard_rows(layout, seed=head)[:3], [7, 8, 20]
    arena = torch.from_numpy(cases.poisoned(PAGES, layout.page.page_bytes)).to(triton_device)
    write_latents(layout, [arena], rows.to(triton_device), torch.tensor(slots).to(triton_device))
    same_pages(arena, wanted_pages(layout, rows, slots, 1.0))


@pytest.mark.parametrize("name", ["dsa/nvfp4", "v4/nvfp4"])
def test_regions_in_buffers_of_their_own_are_written(name: str, triton_device: str) -> None:
    """Each a view of a pool whose slots have more than this layer's page."""
    layout = cases.layout_of(name)
    rows = cases.hard_rows(layout, seed=6)
    units = layout.units_per_page
    pools = [
        torch.full((PAGES, 2, units * size), cases.POISON, dtype=torch.uint8, device=triton_device)
        for size in layout.page.layout.region_bytes
    ]
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=triton_device)
    write_latents(layout, [pool[:, 1] for pool in pools], rows.to(triton_device), slots)
    wanted = wanted_pages(layout, rows, SLOTS, 1.0)
    begin = 0
    for pool in pools:
        size = pool.shape[2]
        same_pages(pool[:, 1], wanted[:, begin : begin + size])
        assert bool((pool[:, 0] == cases.POISON).all())
        begin += size


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_no_units_write_nothing(name: str, triton_device: str) -> None:
    layout = cases.layout_of(name)
    arena = torch.from_numpy(cases.poisoned(1, layout.page.page_bytes)).to(triton_device)
    slots = torch.zeros(0, dtype=torch.int32, device=triton_device)
    write_latents(layout, [arena], torch.zeros(0, layout.width, device=triton_device), slots)
    assert bool((arena == cases.POISON).all())


# --- on a GPU ---


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_a_captured_write_replays(name: str, triton_gpu: str) -> None:
    layout = cases.layout_of(name)
    arena = torch.from_numpy(cases.poisoned(PAGES, layout.page.page_bytes)).to(triton_gpu)
    rows = torch.zeros(12, layout.width, device=triton_gpu)
    slots = torch.full((12,), -1, dtype=torch.int32, device=triton_gpu)
    write_latents(layout, [arena], rows, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_latents(layout, [arena], rows, slots)
    for seed in range(3):
        new = cases.hard_rows(layout, seed)
        rows.copy_(new)
        slots.copy_(torch.tensor(SLOTS))
        arena.fill_(cases.POISON)
        graph.replay()
        same_pages(arena, wanted_pages(layout, new, SLOTS, 1.0))


def test_a_slot_past_2_31_bytes_is_written_there(triton_gpu: str) -> None:
    layout = cases.layout_of("dsa/bf16")
    pages = 2**31 // layout.page.page_bytes + 3
    arena = torch.zeros(pages, layout.page.page_bytes, dtype=torch.uint8, device=triton_gpu)
    row = cases.hard_rows(layout, seed=1)[:1]
    slots = torch.tensor([pages * 64 - 1], dtype=torch.int32, device=triton_gpu)
    write_latents(layout, [arena], row.to(triton_gpu), slots)
    wanted = cases.record(layout, row[0].numpy())[0]
    np.testing.assert_array_equal(arena[-1, -len(wanted) :].cpu().numpy(), wanted)
    assert not bool(arena[:-1].any())


@pytest.mark.parametrize("name", [f"dsa/{one}" for one in cases.DSA])
def test_torch_s_codecs_give_the_same_bytes_on_a_gpu(name: str, triton_gpu: str) -> None:
    """Where torch divides by numbers it multiplies by reciprocals; the codecs do not let it."""
    layout = cases.layout_of(name)
    dtype: Any = layout.kv_dtype
    rows = cases.hard_rows(layout, seed=8)
    found = codecs.encode_latents(rows.to(triton_gpu), dtype, rank=512, scale=0.37)
    for i, row in enumerate(rows.numpy()):
        for part, wanted in zip(found, cases.record(layout, row, 0.37), strict=True):
            np.testing.assert_array_equal(part[i].cpu().numpy(), wanted)
