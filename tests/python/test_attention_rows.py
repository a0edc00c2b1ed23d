"""Slots to rows: against their definition, against `ops.convert` and the adapter's own indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import attention_cases as cases  # noqa: E402
from sparse_kvcm import ops  # noqa: E402
from sparse_kvcm.adapter.slot_mapping import kernel_page_indices  # noqa: E402
from sparse_kvcm.attention import (  # noqa: E402
    RowForm,
    UncoveredUnitError,
    WindowRows,
    sparse_arena_rows,
)
from sparse_kvcm.deepseek_v4 import indices  # noqa: E402

POISON = -12345
FORMS = {
    "slots": RowForm(64, 7 * 64),
    "padded pages": RowForm(64, 7 * 64, page_stride=65),
    "one of many layers": RowForm(8, 7 * 8, page_stride=78 * 8, first=13 * 8),
    "units apart": RowForm(16, 5 * 16 + 3, page_stride=50, unit_stride=3, first=7),
}


def random_slots(rng: Any, b: int, k: int, form: RowForm) -> np.ndarray:
    """Some -1 anywhere; some past the end, and some negative: no slots either."""
    slots = rng.integers(0, form.num_slots, (b, k))
    slots[rng.random((b, k)) < 0.2] = -1
    slots[rng.random((b, k)) < 0.02] = form.num_slots
    slots[rng.random((b, k)) < 0.02] = -7
    return slots


def row_of(slot: int, form: RowForm) -> int:
    if not 0 <= slot < form.num_slots:
        return -1
    page, unit = divmod(slot, form.units_per_page)
    stride = form.units_per_page if form.page_stride is None else form.page_stride
    return form.first + page * stride + unit * form.unit_stride


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("k", [1, 3, 16, 511, 512, 513, 2048])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_slot_becomes_its_row(name: str, k: int, dtype: Any, triton_device: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(k)
    slots = random_slots(rng, 3, k, form)
    wanted = np.vectorize(lambda slot: row_of(int(slot), form))(slots)
    array = torch.from_numpy(slots).to(triton_device, dtype)
    out = torch.full((3, k), POISON, dtype=torch.int32, device=triton_device)
    assert sparse_arena_rows(array, form, out=out) is out
    np.testing.assert_array_equal(out.cpu().numpy(), wanted)
    np.testing.assert_array_equal(sparse_arena_rows(array, form).cpu().numpy(), wanted)


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_those_of_ops_convert(name: str, triton_device: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(5)
    slots = rng.integers(-1, form.num_slots, (4, 40)).astype(np.int32)
    wanted = np.full(slots.shape, POISON, np.int32)
    ops.convert(slots, out=wanted, units_per_page=form.units_per_page, first=form.first,
                page_stride=form.rows_per_page, unit_stride=form.unit_stride,
                num_slots=form.num_slots)  # fmt: skip
    found = sparse_arena_rows(torch.from_numpy(slots).to(triton_device), form)
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)


@pytest.mark.parametrize("seed", range(12))
def test_window_rows_come_before_the_selected_ones(seed: int, triton_device: str) -> None:
    """Random tables with holes, padding, lengths about the window and about a page."""
    rng = np.random.default_rng(seed)
    tokens, width = int(rng.choice([1, 8, 128, 256])), int(rng.choice([1, 7, 16, 128, 600]))
    scale = int(rng.integers(1, 5))
    position, pages, k = int(rng.integers(scale)), int(rng.integers(1, 7)), int(rng.choice([0, 9]))
    near = [0, 1, width - 1, width, width + 1, tokens, tokens + 1, pages * tokens]
    lengths = np.array(rng.choice(near, 5), np.int32)
    table = rng.integers(0, 20, (5, pages)).astype(np.int32)
    table[rng.random(table.shape) < 0.1] = -1
    num_pages, form = 17 * scale, FORMS["padded pages"]
    slots = random_slots(rng, 5, k, form)
    print(f"{seed=} {tokens=} {width=} {scale=} {position=} {pages=} {k=} {lengths=}")
    wanted = [
        cases.window_rows(table[i], int(n), width, tokens, scale, position, num_pages)
        + [row_of(int(slot), form) for slot in slots[i]]
        for i, n in enumerate(lengths)
    ]
    device = triton_device
    window = WindowRows(torch.from_numpy(table).to(device), torch.from_numpy(lengths).to(device),
                        width, tokens, num_pages, scale, position)  # fmt: skip
    big = torch.full((5, width + k + 4), POISON, dtype=torch.int32, device=device)
    out = big[:, 2 : 2 + width + k]
    sparse_arena_rows(torch.from_numpy(slots).to(device), form, window=window, out=out)
    np.testing.assert_array_equal(out.cpu().numpy(), wanted)
    assert bool((big[:, :2] == POISON).all())
    assert bool((big[:, 2 + width + k :] == POISON).all())


@pytest.mark.parametrize("seed", range(3))
def test_window_and_rows_are_the_adapter_s_index_set(seed: int, triton_device: str) -> None:
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.permutation(60).reshape(4, 15).astype(np.int32))
    lengths = torch.tensor([0, 5, 128, 15 * 128], dtype=torch.int32)
    slots = torch.from_numpy(rng.integers(-1, 640, (4, 33)).astype(np.int32))
    table = kernel_page_indices(base, 3, 2)
    local = indices.window_positions(lengths, 128)
    wanted = indices.join(indices.global_indices(table, local, 128), slots)
    window = WindowRows(base.to(triton_device), lengths.to(triton_device), 128, 128, 180, 3, 2)
    found = sparse_arena_rows(slots.to(triton_device), RowForm(32, 640), window=window)
    assert torch.equal(found.cpu(), wanted.rows)


def test_rows_of_any_stride_are_read_and_written(triton_device: str) -> None:
    form = FORMS["padded pages"]
    slots = random_slots(np.random.default_rng(1), 4, 50, form)
    array = torch.from_numpy(slots).to(triton_device, torch.int32)[::2, 3:40]
    found = sparse_arena_rows(array, form).cpu().numpy()
    wanted = np.vectorize(lambda slot: row_of(int(slot), form))(slots[::2, 3:40])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_nothing_selected_gives_nothing(shape: tuple[int, int], triton_device: str) -> None:
    slots = torch.zeros(shape, dtype=torch.int32, device=triton_device)
    assert sparse_arena_rows(slots, RowForm(8, 80)).shape == shape


def test_the_largest_rows_are_right(triton_device: str) -> None:
    """The largest int32, and the largest slot that may have it."""
    form = RowForm(64, 2**31 - 64)
    slots = torch.tensor([[2**31 - 65, 2**31 - 64, 0]], device=triton_device)
    assert sparse_arena_rows(slots, form).tolist() == [[2**31 - 65, -1, 0]]


# --- the debug check ---


def debug_case(device: str) -> dict[str, Any]:
    """Row 9 lacks ordinal 41 at position 2, row 4 ordinals 7 and 8; padding lacks all."""
    slots = torch.tensor([[-1, -1, -1, -1], [0, 1, -1, -1], [5, -1, 1, -1]], dtype=torch.int32)
    selection = torch.tensor([[3, 2, 1, 0], [30, 31, 41, -1], [7, 8, 9, 700]], dtype=torch.int32)
    rows = torch.tensor([-1, 9, 4], dtype=torch.int32)
    arrays = {"slots": slots, "selection": selection, "batch_rows": rows}
    return {name: one.to(device) for name, one in arrays.items()} | {"form": RowForm(8, 80)}


def test_the_debug_check_names_the_first_unit_without_a_row(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = debug_case(triton_device)
    assert sparse_arena_rows(**case).shape == (3, 4)  # not asked for
    monkeypatch.setenv("SPARSE_KVCM_DEBUG_ASSERT", "1")
    with pytest.raises(UncoveredUnitError, match="3 without .*row 9, position 2, ordinal 41") as e:
        sparse_arena_rows(**case)
    assert (e.value.row, e.value.position, e.value.ordinal) == (9, 2, 41)
    with pytest.raises(UncoveredUnitError, match="7 without .*row 0, position 0, ordinal 3"):
        sparse_arena_rows(**(case | {"batch_rows": None}))
    covered = {"selection": case["selection"].where(case["slots"] >= 0, -1)}
    sparse_arena_rows(**(case | covered))
    monkeypatch.setenv("SPARSE_KVCM_DEBUG_ASSERT", "0")
    sparse_arena_rows(**case)


def test_a_slot_outside_the_arena_is_a_unit_without_a_row(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_KVCM_DEBUG_ASSERT", "1")
    slots = torch.tensor([[0, 80]], dtype=torch.int32, device=triton_device)
    with pytest.raises(UncoveredUnitError, match="row 0, position 1, ordinal 6"):
        sparse_arena_rows(slots, RowForm(8, 80), selection=slots.clone().fill_(6))


# --- on a GPU ---


def test_a_captured_launch_reads_what_is_there_at_the_replay(
    triton_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under the debug check, which cannot wait there, and with another layer's first row."""
    monkeypatch.setenv("SPARSE_KVCM_DEBUG_ASSERT", "1")
    forms = [RowForm(64, 640, page_stride=640, first=64 * layer) for layer in (0, 1, 7)]
    slots = torch.zeros((3, 512), dtype=torch.int32, device=triton_gpu)
    outs = [torch.empty_like(slots) for _ in forms]
    sparse_arena_rows(slots, forms[0], out=outs[0], selection=slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for form, out in zip(forms, outs, strict=True):
            sparse_arena_rows(slots, form, out=out, selection=slots)
    for step in range(3):
        new = random_slots(np.random.default_rng(step), 3, 512, forms[0])
        slots.copy_(torch.from_numpy(new))
        graph.replay()
        for form, out in zip(forms, outs, strict=True):
            wanted = np.vectorize(lambda slot, form=form: row_of(int(slot), form))(new)
            np.testing.assert_array_equal(out.cpu().numpy(), wanted)
