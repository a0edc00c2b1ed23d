"""The slice's Triton kernels against the same in torch; interpreted where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from benchmarks.decode_slice import device_ops, kernels  # noqa: E402
from benchmarks.decode_slice.cache import Buffer, random_codes  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNITS, WIDTH, SLOTS, PAGES = 16, 128, 40, 8
ROWS = torch.tensor([2, -1, 0], dtype=torch.int32)


def keys() -> Buffer:
    """Pages of codes and scales, at a stride that is not their size."""
    pages = torch.zeros(SLOTS, UNITS * (WIDTH + 4) + 64, dtype=torch.uint8)
    pages = pages[:, : UNITS * (WIDTH + 4)]
    pages[:, : UNITS * WIDTH] = random_codes(SLOTS, UNITS * WIDTH, seed=0)
    scales = torch.rand(SLOTS, UNITS, generator=torch.Generator().manual_seed(1))
    pages[:, UNITS * WIDTH :] = scales.view(torch.uint8)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))
    return Buffer(pages, UNITS, order[: 3 * PAGES].view(3, PAGES).int())


def on_device(*tensors: Any) -> list[Any]:
    return [one.to(DEVICE) for one in tensors]


@pytest.mark.parametrize("lengths", [[100, 0, 128], [1, 0, 17], [16, 0, 64]])
def test_scores_are_those_of_torch(lengths: list[int]) -> None:
    buffer, heads = keys(), 16
    random = torch.Generator().manual_seed(3)
    queries = torch.randn(3, heads, WIDTH, generator=random).to(device_ops.FP8)
    weights = torch.randn(3, heads, generator=random)
    count = torch.tensor(lengths, dtype=torch.int32)
    expected = torch.full((3, 128), -7.0)
    device_ops.index_scores(queries, weights, buffer, ROWS, count, expected)

    got = torch.full((3, 128), -7.0, device=DEVICE)
    stride = buffer.pages.stride(0)
    whole = torch.as_strided(buffer.pages, (SLOTS, stride), (stride, 1)).to(DEVICE)
    q, w, table, rows, n = on_device(queries, weights, buffer.table, ROWS, count)
    kernels.index_scores[(3, 2)](
        q, w, whole, table, rows, n, got, stride, UNITS * WIDTH, PAGES, 128,
        HEADS=heads, WIDTH=WIDTH, UNITS=UNITS, BLOCK=32, STEPS=2,
    )  # fmt: skip
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("length", "k"), [(128, 16), (128, 128), (100, 128), (1, 16), (33, 32)])
def test_the_best_are_those_of_torch(length: int, k: int) -> None:
    scores = torch.randn(3, 128, generator=torch.Generator().manual_seed(length))
    lengths = torch.tensor([length, 0, 7], dtype=torch.int32)
    expected = torch.full((3, k), -1, dtype=torch.int32)
    device_ops.top_k(scores, lengths, expected)
    on, n = on_device(scores, lengths)
    got = torch.full((3, k), -1, dtype=torch.int32, device=DEVICE)
    kernels.top_k[(3,)](on, n, got, 128, K=k, CHUNK=32)
    assert got.cpu().sort().values.tolist() == expected.sort().values.tolist()


def test_the_best_of_equal_scores_are_as_many_as_asked_for() -> None:
    scores = torch.zeros(1, 128, device=DEVICE)
    scores[0, 100] = 1.0
    got = torch.full((1, 16), -1, dtype=torch.int32, device=DEVICE)
    kernels.top_k[(1,)](
        scores, torch.tensor([128], dtype=torch.int32, device=DEVICE), got, 128, K=16, CHUNK=32
    )
    chosen = set(got[0].tolist())
    assert len(chosen) == 16
    assert 100 in chosen
    assert min(chosen) >= 0


def test_slots_are_those_of_torch() -> None:
    buffer = keys()
    ordinals = torch.randint(-1, 128, (3, 50), generator=torch.Generator().manual_seed(4)).int()
    buffer.table[0, 3] = -1
    expected = device_ops.look_up(ordinals, buffer, ROWS)
    o, table, rows = on_device(ordinals, buffer.table, ROWS)
    got = torch.empty((3, 50), dtype=torch.int32, device=DEVICE)
    kernels.look_up[(3, 1)](o, table, rows, got, 50, 50, PAGES, UNITS=UNITS, BLOCK=64)
    assert torch.equal(got.cpu(), expected)
    assert (expected[1] == -1).all()


@pytest.mark.parametrize(("size", "offset"), [(WIDTH, 0), (4, UNITS * WIDTH)])
def test_writes_are_those_of_torch_and_skip_slot_minus_one(size: int, offset: int) -> None:
    record = random_codes(3, size, seed=5)
    slots = torch.tensor([5, -1, 77], dtype=torch.int32)
    expected = keys()
    before = expected.pages.clone()
    device_ops.write_units(record, slots, expected, offset)
    pages, r, s = on_device(before.clone(), record, slots)
    kernels.write_units[(3,)](
        r, s, pages, pages.stride(0), offset, 1, BYTES=size, UNITS=UNITS, BLOCK=size
    )
    assert torch.equal(pages.cpu(), expected.pages)
    assert int((expected.pages != before).any(1).sum()) == 2
