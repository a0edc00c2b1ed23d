"""What Triton's functions refuse: they address memory by what a tensor says of itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import attention_cases as cases  # noqa: E402
from sparse_kvcm.attention import (  # noqa: E402
    RowForm,
    WindowRows,
    sparse_arena_rows,
    write_latents,
)

FORM = RowForm(8, 80)
META = torch.device("meta")


def ints(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


def refused(match: str) -> Any:
    return pytest.raises(kvcm.InvalidArgument, match=match)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[1]], r"slots must be a torch.Tensor, got list"),
        (torch.zeros(2, 4), "slots must be int32 or int64, strided, got torch.float32"),
        (torch.zeros((2, 4), dtype=torch.uint32), "slots must be int32 or int64"),
        (ints(2, 4).to_sparse(), "slots must be int32 or int64, strided"),
        (ints(4), r"slots must have shape \(any, any\), got \(4,\)"),
        (ints(2, 3, 4), r"slots must have shape \(any, any\), got \(2, 3, 4\)"),
        (ints(4, 2).T, r"slots must have contiguous rows, got strides \(1, 2\)"),
        (ints(2, 8)[:, ::2], r"slots must have contiguous rows, got strides \(8, 2\)"),
        (ints(2, 1).expand(2, 4), r"slots must have contiguous rows, got strides \(1, 0\)"),
        (ints(2, 4).to(META), "slots must be on a GPU, or on the CPU under .*got meta"),
    ],
)
def test_slots_that_cannot_be_read_are_refused(slots: Any, message: str) -> None:
    with refused(message):
        sparse_arena_rows(slots, FORM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": ints(2, 5)}, r"out must have shape \(2, 4\), got \(2, 5\)"),
        ({"out": ints(2, 4).long()}, "out must be int32, strided, got torch.int64"),
        ({"out": ints(1, 4).expand(2, 4)}, r"out must have rows of its own, got strides \(0, 1\)"),
        ({"out": ints(8)[:6].as_strided((2, 4), (2, 1))}, "out must have rows of its own"),
        ({"out": ints(4, 2).T}, "out must have contiguous rows"),
        ({"out": ints(2, 4).to(META)}, "out must be on cpu, where the others are, got meta"),
        ({"selection": ints(2, 3)}, r"selection must have shape \(2, 4\), got \(2, 3\)"),
        ({"selection": torch.zeros(2, 4)}, "selection must be int32 or int64"),
        ({"batch_rows": ints(3)}, r"batch_rows must have shape \(2,\), got \(3,\)"),
        ({"batch_rows": ints(4)[::2]}, r"batch_rows must be contiguous, got strides \(2,\)"),
        ({"batch_rows": ints(2).to(META)}, "batch_rows must be on cpu"),
        ({"batch_rows": [0, 1]}, "batch_rows must be a torch.Tensor, got list"),
    ],
)
def test_arrays_that_do_not_fit_slots_are_refused(arguments: Any, message: str) -> None:
    with refused(message):
        sparse_arena_rows(ints(2, 4), FORM, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"units_per_page": 0}, "units_per_page must be an int >= 1, got 0"),
        ({"units_per_page": True}, "units_per_page must be an int >= 1, got True"),
        ({"num_slots": -1}, "num_slots must be an int >= 0, got -1"),
        ({"num_slots": 8.0}, "num_slots must be an int >= 0, got 8.0"),
        ({"page_stride": 7}, "page_stride must be an int >= 8, got 7"),
        ({"page_stride": 21, "unit_stride": 3}, "page_stride must be an int >= 22, got 21"),
        ({"unit_stride": 0}, "unit_stride must be an int >= 1, got 0"),
        ({"first": -1}, "first must be an int >= 0, got -1"),
        ({"first": 2**31 - 80}, r"rows must be < 2\^31, which kernels take, got up to"),
        ({"num_slots": 2**31}, r"rows must be < 2\^31"),
        ({"page_stride": 2**28}, r"rows must be < 2\^31"),
    ],
)
def test_forms_without_a_row_for_each_slot_are_refused(fields: Any, message: str) -> None:
    with refused(message):
        RowForm(**({"units_per_page": 8, "num_slots": 80} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"table": ints(3, 5)}, r"window.table must have shape \(2, any\), got \(3, 5\)"),
        ({"table": ints(2, 5).long()}, "window.table must be int32"),
        ({"table": ints(5, 2).T}, "window.table must have contiguous rows"),
        ({"table": ints(2, 5).to(META)}, "window.table must be on cpu"),
        ({"lengths": ints(3)}, r"window.lengths must have shape \(2,\)"),
        ({"lengths": ints(4)[::2]}, "window.lengths must be contiguous"),
        ({"lengths": ints(2).long()}, "window.lengths must be int32"),
        ({"width": 0}, "window.width must be an int >= 1, got 0"),
        ({"tokens_per_page": 0}, "window.tokens_per_page must be an int >= 1, got 0"),
        ({"scale": 0}, "window.scale must be an int >= 1, got 0"),
        ({"position": -1}, "window.position must be an int >= 0, got -1"),
        ({"num_pages": -1}, "window.num_pages must be an int >= 0, got -1"),
        ({"num_pages": 2**24, "tokens_per_page": 256}, r"window rows must be < 2\^31"),
    ],
)
def test_windows_that_do_not_fit_are_refused(fields: Any, message: str) -> None:
    good = {"table": ints(2, 5), "lengths": ints(2), "width": 3, "tokens_per_page": 8}
    window = WindowRows(**(good | {"num_pages": 9} | fields))
    with refused(message):
        sparse_arena_rows(ints(2, 4), FORM, window=window)


LAYOUT = cases.layout_of("dsa/fp8_ds_mla")
BYTES = LAYOUT.page.page_bytes
ARENA = torch.zeros((2, BYTES), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latents": torch.zeros(3, 512)}, r"latents must have shape \(any, 576\), got \(3, 512\)"),
        ({"latents": torch.zeros(3, 576).double()}, "latents must be bfloat16 or float16 or"),
        ({"latents": torch.zeros(576, 3).T}, "latents must have contiguous rows"),
        ({"latents": torch.zeros(3, 1).expand(3, 576)}, "latents must have contiguous rows"),
        ({"latents": torch.zeros(576)}, r"latents must have shape \(any, 576\), got \(576,\)"),
        ({"rotary": torch.zeros(3, 64)}, r"latents must have shape \(any, 512\), got \(3, 576\)"),
        ({"latents": torch.zeros(3, 512), "rotary": torch.zeros(2, 64)},
         r"rotary must have shape \(3, 64\), got \(2, 64\)"),
        ({"slots": ints(2)}, r"slots must have shape \(3,\), got \(2,\)"),
        ({"slots": ints(3, 1)}, r"slots must have shape \(3,\), got \(3, 1\)"),
        ({"slots": torch.zeros(3)}, "slots must be int32 or int64"),
        ({"slots": [1, 2, 3]}, "slots must be a torch.Tensor, got list"),
        ({"slots": ints(3).to(META)}, "slots must be on cpu, where the others are, got meta"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"scale": -1.0}, "scale must be positive and finite, got -1.0"),
        ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
        ({"buffers": [ARENA, ARENA]}, "must be 1, with all regions, or 1, got 2"),
        ({"buffers": []}, "must be 1, with all regions, or 1, got 0"),
        ({"buffers": [ARENA[:, 4:]]}, f"the {BYTES} bytes of a page contiguous, got torch.uint8"),
        ({"buffers": [ARENA.T]}, "bytes of a page contiguous"),
        ({"buffers": [ARENA[0]]}, "bytes of a page contiguous"),
        ({"buffers": [ARENA.to(META)]}, "buffers must be on cpu, where the others are, got meta"),
        ({"buffers": [torch.zeros(2 * BYTES + 4, dtype=torch.uint8)[1:].as_strided(
            (2, BYTES), (BYTES, 1))]}, "buffers must be aligned to 4 bytes"),
        ({"buffers": [torch.zeros(2 * BYTES + 4, dtype=torch.uint8).as_strided(
            (2, BYTES), (BYTES + 2, 1))]}, "buffers must be aligned to 4 bytes"),
    ],
)  # fmt: skip
def test_writes_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    good = {"buffers": [ARENA], "latents": torch.zeros(3, 576), "slots": ints(3)}
    with refused(message):
        write_latents(LAYOUT, **(good | arguments))
    assert not bool(ARENA.any())


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    clean = {name: one for name, one in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=clean | environment,
    )


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    code = """
import torch, sparse_kvcm.attention as attention
attention.sparse_arena_rows(torch.zeros((1, 1), dtype=torch.int32), attention.RowForm(8, 80))
"""
    error = run(code).stderr
    assert "InvalidArgument: [sparse_arena_rows] slots must be on a GPU, or on the CPU" in error


def test_without_triton_a_call_names_the_extra_and_everything_else_works() -> None:
    code = """
import sys
sys.modules["triton"] = None
import sparse_kvcm.attention as attention, torch
from sparse_kvcm.models import load_geometry
layout = attention.dsa_layout(load_geometry("glm-5.2"), "fp8")
assert layout.page.page_bytes == 64 * 576
attention.sparse_arena_rows(torch.zeros((1, 1), dtype=torch.int32), attention.RowForm(8, 80))
"""
    error = run(code).stderr
    assert "ImportError: sparse_kvcm.attention needs triton, which cannot be imported" in error
    assert "pip install 'sparse_kvcm[triton]'" in error


def test_the_package_is_imported_without_torch_and_triton() -> None:
    code = """
import sys, sparse_kvcm.attention
sys.exit(bool({"torch", "triton"} & set(sys.modules)))
"""
    assert run(code).returncode == 0
