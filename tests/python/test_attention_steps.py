"""A manager's step through the attention side: what its own calls read and write, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import dsa_cases  # noqa: E402
import v4_cases  # noqa: E402
from sparse_kvcm.attention import (  # noqa: E402
    UncoveredUnitError,
    attention_base,
    step_rows,
    write_step,
)
from sparse_kvcm.deepseek_v4 import AttentionType  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

SWA, COMPRESS = AttentionType.SWA, AttentionType.COMPRESS
KV_DTYPES = ["bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"]
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def dsa_manager(which: int, kv_dtype: Any, device: str) -> Any:
    """One of the three, with requests of 40 and 63 tokens in a step of three rows."""
    manager = dsa_cases.managers(kv_dtype=kv_dtype, device=device, kv_scale=0.37)[which]
    for request, prompt in ((1, 40), (2, 63)):
        manager.add_request(request, 100)
        parts = dsa_cases.history(manager.config.geometry, request, 0, prompt)
        manager.import_history(
            request, *({i: rows.to(device) for i, rows in part.items()} for part in parts)
        )
    manager.prepare_step([StepRequest(1, 40), StepRequest(2, 63)], padded_size=3)
    return manager


def dsa_selection(device: str) -> Any:
    selection = np.full((3, dsa_cases.TOP_K), -1, np.int32)
    rng = np.random.default_rng(3)
    for row, n in enumerate((40, 63)):
        selection[row, 1:] = rng.choice(n + 1, dsa_cases.TOP_K - 1, replace=False)
        selection[row, 5] = n  # the token of this step
    return torch.from_numpy(selection).to(device)


def same_buffers(found: Any, wanted: Any, layer: int, kind: Any = None) -> None:
    """But for the page that may be written freely."""
    a, b = (attention_base(one, layer, kind) for one in (found, wanted))
    for left, right in zip(a.buffers, b.buffers, strict=True):
        last = len(left) - 1 if a.is_arena else len(left)
        assert torch.equal(left[:last].cpu(), right[:last].cpu()), (layer, kind)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_latents_are_written_as_the_manager_writes_them(
    which: int, kv_dtype: Any, triton_device: str
) -> None:
    ours, theirs = (dsa_manager(which, kv_dtype, triton_device) for _ in range(2))
    selection = dsa_selection(triton_device)
    rng = np.random.default_rng(which)
    for group in ours.config.geometry.groups:
        slots = [one.select(group[0], selection) for one in (ours, theirs)]
        assert torch.equal(*slots)
        for layer in group:
            rows = torch.from_numpy(rng.standard_normal((3, 192), np.float32)).to(triton_device)
            write_step(ours, layer, rows)
            theirs.write_latents(layer, rows)
            found = step_rows(ours, layer, slots[0], selection=selection)
            assert (found.num_window, found.rows.dtype) == (0, torch.int32)
            assert torch.equal(found.rows, slots[1].to(torch.int32))
    for layer in ours.config.geometry.history_layers:
        same_buffers(ours, theirs, layer)


def v4_manager(offloads: bool, kv_dtype: Any, device: str, lengths: dict[int, int]) -> Any:
    made = v4_cases.manager(
        offloads, geometry=v4_cases.geometry(**WIDE), kv_dtype=kv_dtype, device=device,
        index_dtype="fp8", gpu_quota=64 << 20,
    )  # fmt: skip
    for request, length in lengths.items():
        made.add_request(request, 900)
        made.import_history(request, v4_cases.history(made.config.geometry, request, length))
    made.prepare_step([StepRequest(i, n) for i, n in lengths.items()], padded_size=3)
    return made


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("offloads", [False, True])
def test_windows_and_entries_are_written_and_read_as_the_manager_does(
    offloads: bool, kv_dtype: Any, triton_device: str
) -> None:
    """One request completes an entry of both ratios, one none, and one row is padding."""
    lengths = {1: 255, 2: 301}
    ours, theirs = (v4_manager(offloads, kv_dtype, triton_device, lengths) for _ in range(2))
    rng = np.random.default_rng(7)
    selection = np.full((3, v4_cases.TOP_K), -1, np.int32)
    selection[0, :4], selection[1, 2:5] = [63, 5, -1, 0], [74, 1, 30]
    chosen = torch.from_numpy(selection).to(triton_device)

    def new() -> Any:
        return torch.from_numpy(rng.standard_normal((3, 512), np.float32)).to(triton_device)

    for layer, ratio in enumerate(ours.config.geometry.compress_ratios):
        values = new()
        write_step(ours, layer, values, kind=SWA)
        theirs.write_window(layer, values)
        slots = None
        if ratio == 4:
            slots = ours.select(layer, chosen)
            assert torch.equal(slots, theirs.select(layer, chosen))
        if ratio:
            values = new()
            write_step(ours, layer, values)
            theirs.write_entries(layer, COMPRESS, values)
        found = step_rows(ours, layer, slots, selection=None if slots is None else chosen)
        wanted = theirs.attention_indices(layer, slots)
        assert found.num_window == wanted.num_window == v4_cases.WINDOW
        assert torch.equal(found.rows, wanted.rows), layer
    for layer, ratio in enumerate(ours.config.geometry.compress_ratios):
        same_buffers(ours, theirs, layer, SWA)
        if ratio:
            same_buffers(ours, theirs, layer, COMPRESS)


@pytest.mark.parametrize("offloads", [False, True])
def test_queries_of_a_step_may_be_served_one_after_the_other(
    offloads: bool, triton_device: str
) -> None:
    """Each in a forward of its own, the second before the first; bytes and rows are one step's."""
    lengths = {1: 255, 2: 303}
    ours, theirs = (v4_manager(offloads, "bf16", triton_device, lengths) for _ in range(2))
    rng = np.random.default_rng(8)
    selection = np.full((3, v4_cases.TOP_K), -1, np.int32)
    selection[0, :4], selection[1, 2:5] = [63, 5, -1, 0], [75, 1, 30]
    chosen = torch.from_numpy(selection).to(triton_device)
    ratios = ours.config.geometry.compress_ratios
    new = [
        torch.from_numpy(rng.standard_normal((2, 3, 512), np.float32)).to(triton_device)
        for _ in ratios
    ]
    wanted = []
    for layer, ratio in enumerate(ratios):
        theirs.write_window(layer, new[layer][0])
        slots = theirs.select(layer, chosen) if ratio == 4 else None
        if ratio:
            theirs.write_entries(layer, COMPRESS, new[layer][1])
        wanted.append(theirs.attention_indices(layer, slots).rows)
    for at in ([1], slice(0, 1), [2]):
        for layer, ratio in enumerate(ratios):
            write_step(ours, layer, new[layer][0][at], kind=SWA, at=at)
            slots = ours.select(layer, chosen[at], at) if ratio == 4 else None
            if ratio:
                write_step(ours, layer, new[layer][1][at], at=at)
            assert torch.equal(step_rows(ours, layer, slots, at=at).rows, wanted[layer][at]), layer
    for layer, ratio in enumerate(ratios):
        for kind in (SWA, COMPRESS) if ratio else (SWA,):
            same_buffers(ours, theirs, layer, kind)


def test_rows_of_a_prompt_s_step_are_those_of_each_query(triton_device: str) -> None:
    """Queries are more than rows, and windows of the prompt lie in scratch pages."""
    made = v4_cases.manager(False, device=triton_device, max_num_tokens=600)
    made.add_request(1, 900)
    made.prepare_step([StepRequest(1, 0, new_tokens=260)])
    assert any(made.step.scratch.values())
    for layer, ratio in enumerate(made.config.geometry.compress_ratios):
        slots = None
        if ratio == 4:
            selection = torch.full((260, 2), -1, dtype=torch.int32, device=triton_device)
            selection[7:, 0] = 1
            slots = made.select(layer, selection)
        found = step_rows(made, layer, slots)
        assert torch.equal(found.rows, made.attention_indices(layer, slots).rows), layer


def test_a_selected_unit_that_was_dropped_is_named(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seat is named, not the place in the launch; padding may select whatever it likes."""
    monkeypatch.setenv("SPARSE_KVCM_DEBUG_ASSERT", "1")
    manager = dsa_manager(1, "bf16", triton_device)
    selection = dsa_selection(triton_device)
    slots = manager.select(0, selection).clone()
    selection[2] = 4
    step_rows(manager, 0, slots, selection=selection)
    slots[1, 3] = -1
    row, ordinal = int(manager.step.rows[1]), int(selection[1, 3])
    with pytest.raises(UncoveredUnitError, match=f"row {row}, position 3, ordinal {ordinal}"):
        step_rows(manager, 0, slots, selection=selection)


def test_calls_that_do_not_fit_are_refused(triton_device: str) -> None:
    manager = dsa_manager(1, "bf16", triton_device)
    rows = torch.zeros(3, 192, device=triton_device)
    with pytest.raises(kvcm.InvalidState, match="select"):
        write_step(manager, 0, rows)
    with pytest.raises(kvcm.InvalidArgument, match="every layer of DSA selects"):
        step_rows(manager, 0)
    manager.select(0, dsa_selection(triton_device))
    with pytest.raises(kvcm.InvalidArgument, match=r"latents must have shape \(any, 192\)"):
        write_step(manager, 0, rows[:, :128].contiguous())
    with pytest.raises(kvcm.InvalidArgument, match=r"slots must have shape \(2,\), got \(3,\)"):
        write_step(manager, 0, rows[:2])
    with pytest.raises(kvcm.InvalidArgument, match="at must be left out with DSA"):
        write_step(manager, 0, rows[:2], at=slice(0, 2))
    manager.end_step()
    with pytest.raises(kvcm.InvalidState, match="no step is open"):
        write_step(manager, 0, rows)
    v4 = v4_manager(True, "bf16", triton_device, {1: 40})
    with pytest.raises(kvcm.InvalidArgument, match="ratio 4 alone, layer 1 has ratio 4"):
        step_rows(v4, 1)
    with pytest.raises(kvcm.InvalidArgument, match="ratio 4 alone, layer 0 has ratio 0"):
        step_rows(v4, 0, torch.zeros((3, 1), dtype=torch.int32))
    with pytest.raises(kvcm.InvalidArgument, match="step_rows.*at must be"):
        step_rows(v4, 0, at=[3])
    v4.select(1, torch.full((3, 1), -1, dtype=torch.int32, device=triton_device))
    entries = torch.zeros(1, 512, device=triton_device)
    with pytest.raises(kvcm.InvalidArgument, match="at must be that of the layer's select"):
        write_step(v4, 1, entries, at=slice(0, 1))
    v4.abort_step()
    with pytest.raises(kvcm.InvalidState, match="no step is open"):
        step_rows(v4, 0)
