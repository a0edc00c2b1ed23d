"""What DSA managers refuse, whatever their version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.dsa import StepFaultError  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

MANAGERS = pytest.mark.parametrize("which", [0, 1, 2], ids=["v1", "offload", "resident"])
Call = Callable[[Any], Any]
WIDTH = cases.RANK + cases.ROPE


def zeros(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_calls_out_of_place_are_refused(which: int) -> None:
    manager = cases.managers()[which]
    model = manager.config.geometry
    manager.add_request(1, 100)
    with pytest.raises(kvcm.InvalidArgument, match="request_id 1 must be a new one"):
        manager.add_request(1, 100)
    with pytest.raises(kvcm.InvalidArgument, match=r"max_tokens .* in \[1, 200\], got 201"):
        manager.add_request(2, 201)
    with pytest.raises(kvcm.InvalidArgument, match="request_id must be one of .*, got 9"):
        manager.free_request(9)
    with pytest.raises(kvcm.InvalidState, match="no step is open"):
        manager.end_step()
    with pytest.raises(kvcm.InvalidState, match="no step is open"):
        manager.select(0, torch.zeros(1, 4, dtype=torch.int32))
    latents, keys = cases.history(model, 1, 0, 3)
    with pytest.raises(kvcm.InvalidArgument, match=r"keys .* layers \[0, 1, 4\], .* \[0, 4\]"):
        manager.import_history(1, latents, {k: v for k, v in keys.items() if k != 1})
    with pytest.raises(kvcm.InvalidArgument, match=r"latents\[3\] must be \(3, 192\), got \(2"):
        manager.import_history(1, latents | {3: latents[3][:2]}, keys)
    with pytest.raises(kvcm.OutOfPages, match="no room for 101 tokens of request 1, at most 100"):
        manager.import_history(1, *cases.history(model, 1, 0, 101))
    manager.prepare_step([StepRequest(1, 0)])
    with pytest.raises(kvcm.InvalidArgument, match="of 0, 1, 4; got 2, which shares .* layer 1"):
        manager.select(2, torch.zeros(1, 4, dtype=torch.int32))
    manager.abort_step()


# --- in an open step of two requests; layers 0, 1 and 4 of six own an indexer ---

IN_A_STEP: dict[str, tuple[Call, str]] = {
    "select past the last": (lambda m: m.select(9, ints(2, 4)), r"\[select\] .* 0, 1, 4; got 9"),
    "select before the first": (lambda m: m.select(-1, ints(2, 4)), r"\[select\] .* got -1"),
    "select by name": (lambda m: m.select("x", ints(2, 4)), r"\[select\] layer .* got 'x'"),
    "select by a bool": (lambda m: m.select(True, ints(2, 4)), r"layer must be an int, got True"),
    "select by a list": (lambda m: m.select([0], ints(2, 4)), r"layer must be an int, got \[0\]"),
    "a selection too few": (lambda m: m.select(0, ints(1, 4)), r"\(2, k\), got \(1, 4\)"),
    "a selection too many": (lambda m: m.select(0, ints(3, 4)), r"\(2, k\), got \(3, 4\)"),
    "a flat selection": (lambda m: m.select(0, ints(2)), r"\(2, k\), got \(2,\)"),
    "a wide selection": (lambda m: m.select(0, ints(2, 17)), r"k in \[1, top-k 16\], got \(2, 17"),
    "no column": (lambda m: m.select(0, ints(2, 0)), r"k in \[1, top-k 16\], got \(2, 0\)"),
    "a float selection": (lambda m: m.select(0, zeros(2, 4)), "must be int32, got torch.float32"),
    "a long selection": (lambda m: m.select(0, ints(2, 4).long()), "must be int32, got torch.int6"),
    "no selection": (lambda m: m.select(0, None), r"\[select\] selection .* got NoneType"),
    "NumPy's selection": (lambda m: m.select(0, np.zeros((2, 4), np.int32)), "Tensor, got ndarray"),
    "a selection elsewhere": (lambda m: m.select(0, ints(2, 4).to("meta")), "on cpu, got meta"),
    "latents past the last": (
        lambda m: m.write_latents(6, zeros(2, WIDTH)),
        r"\[write_latents\] layer must be an int in \[0, 5\], got 6",
    ),
    "latents of no layer": (lambda m: m.write_latents(None, zeros(2, WIDTH)), "layer .* got None"),
    "narrow latents": (lambda m: m.write_latents(0, zeros(2, WIDTH - 1)), r"\(2, 192\), got \(2, "),
    "latents too few": (lambda m: m.write_latents(0, zeros(1, WIDTH)), r"\(2, 192\), got \(1, 192"),
    "latents too many": (lambda m: m.write_latents(0, zeros(3, WIDTH)), r"\(2, 192\), got \(3, 1"),
    "integers": (lambda m: m.write_latents(0, ints(2, WIDTH)), "must be float, got torch.int32"),
    "complex latents": (
        lambda m: m.write_latents(0, zeros(2, WIDTH, dtype=torch.complex64)),
        "must be float, got torch.complex64",
    ),
    "no latents": (lambda m: m.write_latents(0, None), r"\[write_latents\] latents .* NoneType"),
    "keys of a layer that shares": (
        lambda m: m.write_index_keys(2, zeros(2, 128)),
        r"\[write_index_keys\] layer must own an indexer, .* got 2, which shares that of layer 1",
    ),
    "narrow keys": (lambda m: m.write_index_keys(0, zeros(2, 64)), r"\(2, 128\), got \(2, 64\)"),
    "keys too few": (lambda m: m.write_index_keys(0, zeros(1, 128)), r"\(2, 128\), got \(1, 128"),
    "integer keys": (lambda m: m.write_index_keys(0, ints(2, 128)), "must be float, got torch.int"),
    "NumPy's keys": (lambda m: m.write_index_keys(0, np.zeros((2, 128))), "got ndarray"),
    "gather past the last": (lambda m: m.gather_latents(6, ints(2, 4)), r"\[0, 5\], got 6"),
    "float slots": (lambda m: m.gather_latents(0, zeros(2, 4)), "slots must be int32 or int64"),
    "no slots": (lambda m: m.gather_latents(0, None), r"\[gather_latents\] slots .* NoneType"),
    "no mapping": (lambda m: m.gather_index_keys(0, None), r"mapping must be a SlotMapping of .*N"),
    "keys that a layer shares": (
        lambda m: m.gather_index_keys(2, m.step.slots["INDEX_KEY"]),
        r"\[gather_index_keys\] layer must own an indexer",
    ),
    "buffers past the last": (lambda m: m.get_buffers(6), r"\[get_buffers\] .* \[0, 5\], got 6"),
    "buffers before the first": (lambda m: m.get_buffers(-1), r"\[get_buffers\] layer .* got -1"),
    "another role": (lambda m: m.get_buffers(0, "X"), r"\[get_buffers\] role .* KEY, .* got X"),
    "index keys of none": (lambda m: m.get_indexer_k_cache_buffers("x"), "layer must be an int"),
    "bytes of another role": (
        lambda m: m.bytes_per_token("X"),
        r"\[bytes_per_token\] role must be one of .*INDEX_KEY, .*ALL, got 'X'",
    ),
    "places of another role": (
        lambda m: m.step.full_kv("X"),
        r"\[full_kv\] role must be one with pages on the GPU, .*INDEX_KEY, got 'X'",
    ),
}  # fmt: skip


def two_requests(which: int) -> Any:
    manager = cases.managers()[which]
    for request, prompt in ((1, 70), (2, 9)):
        manager.add_request(request, 200)
        tokens = cases.history(manager.config.geometry, request, 0, prompt)
        manager.import_history(request, *tokens)
    return manager


def take_step(manager: Any) -> None:
    """A forward, which reads the first tokens and the new ones, and finds what they were."""
    lengths = [one.length for one in manager.step.prepared.requests]
    chosen = torch.tensor([[0, n - 1, 5, -1] for n in lengths], dtype=torch.int32)
    found = cases.write_tokens(manager, dict.fromkeys(range(3), chosen))
    for layer, rows in found.items():
        for row, one in zip(rows, manager.step.prepared.requests, strict=True):
            want = cases.latents(one.request_id, layer, [0, 5]).bfloat16().float()
            assert torch.equal(row[[0, 2]], want)
            new = cases.latents(one.request_id + 1000, layer, [one.history]).bfloat16().float()
            assert torch.equal(row[1:2], new)
            assert not row[3].any()
    manager.end_step()


@MANAGERS
@pytest.mark.parametrize("case", IN_A_STEP)
def test_a_call_of_a_step_is_refused_and_the_step_goes_on(case: str, which: int) -> None:
    call, message = IN_A_STEP[case]
    manager = two_requests(which)
    manager.prepare_step([StepRequest(1, 70), StepRequest(2, 9)])
    with pytest.raises(kvcm.InvalidArgument, match=message):
        call(manager)
    take_step(manager)
    assert [manager.frontier(request) for request in (1, 2)] == [71, 10]


@MANAGERS
def test_tokens_that_are_not_there_have_no_slots(which: int) -> None:
    """Whether pages have room for them or not, and whatever lies there."""
    manager = two_requests(which)
    manager.prepare_step([StepRequest(1, 70), StepRequest(2, 9)], padded_size=3)
    names = torch.tensor([[70, 71, 79, 80, -7], [9, 10, 70, 0, 8], [0, 1, 2, 3, 4]])
    for group in (0, 1, 4):
        slots = manager.select(group, names.int())
        assert (slots >= 0).tolist() == [
            [True, False, False, False, False],
            [True, False, False, True, True],
            [False] * 5,
        ]
    manager.abort_step()


@MANAGERS
def test_a_selection_may_have_any_strides(which: int) -> None:
    manager = two_requests(which)
    manager.prepare_step([StepRequest(1, 70), StepRequest(2, 9)])
    slots = manager.select(0, torch.tensor([[0, 1], [5, 9]], dtype=torch.int32).T)
    assert bool((slots >= 0).all())
    manager.abort_step()


def test_what_the_device_reports_late_leaves_no_step_open() -> None:
    manager = two_requests(1)
    requests = [StepRequest(1, 70), StepRequest(2, 9)]
    manager.prepare_step(requests)
    manager.select(0, torch.full((2, 1), 150, dtype=torch.int32))
    manager.end_step()
    for one in requests:
        one.history += 1
    with pytest.raises(StepFaultError, match="RANGE"):
        manager.prepare_step(requests)
    manager.prepare_step(requests)
    manager.select(0, torch.full((2, 1), 150, dtype=torch.int32))  # of a forward that fails
    with pytest.raises(StepFaultError, match="RANGE"):
        manager.prepare_step(requests)
    assert manager.step is None
    with pytest.raises(kvcm.InvalidState, match=r"\[end_step\] no step is open"):
        manager.end_step()
    assert manager.frontier(1) == 71


@pytest.mark.parametrize("end", ["end_step", "abort_step", None])
def test_a_selection_counts_for_its_step_alone(end: str | None) -> None:
    """Fails if a forward that failed, or one before, leaves the slots that it wrote to."""
    manager = two_requests(1)
    requests = [StepRequest(1, 70), StepRequest(2, 9)]
    manager.prepare_step(requests)
    for leader in (0, 1, 4):
        manager.select(leader, torch.tensor([[0], [1]], dtype=torch.int32))
    if end is not None:
        getattr(manager, end)()
    for one in requests:
        one.history += end == "end_step"
    manager.prepare_step(requests)
    for layer in range(6):
        for call in (
            lambda layer=layer: manager.write_latents(layer, zeros(2, WIDTH)),
            lambda layer=layer: manager.resolved(layer),
        ):
            with pytest.raises(kvcm.InvalidState, match="needs the selection of layer . first"):
                call()
    take_step(manager)


# --- requests ---

IMPORTS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nothing": (lambda latents, keys: (None, None), "latents must be a mapping .* got None"),
    "lists": (lambda latents, keys: ([1], keys), r"latents must be a mapping .* got \[1\]"),
    "a layer more": (lambda latents, keys: (latents | {"x": latents[0]}, keys), r"latents .* 'x'"),
    "a layer less": (lambda latents, keys: (latents, {0: keys[0]}), r"index_keys .* got \[0\]"),
    "NumPy's": (lambda latents, keys: (latents | {3: latents[3].numpy()}, keys), "got ndarray"),
    "no array": (lambda latents, keys: (latents | {0: None}, keys), r"latents\[0\] .* NoneType"),
    "integers": (lambda latents, keys: (latents | {5: latents[5].int()}, keys), "torch.int32"),
    "a number": (lambda latents, keys: (latents | {0: torch.tensor(1.0)}, keys), r"got \(\)"),
    "narrow": (lambda latents, keys: (latents | {1: latents[1][:, 1:]}, keys), r"\(3, 192\), got"),
    "short": (lambda latents, keys: (latents, keys | {4: keys[4][1:]}), r"keys\[4\] .* \(3, 128\)"),
    "nowhere": (lambda latents, keys: (latents, keys | {4: keys[4].to("meta")}), "got meta"),
}  # fmt: skip


@MANAGERS
@pytest.mark.parametrize("case", IMPORTS)
def test_an_import_that_does_not_fit_leaves_the_request_as_it_was(case: str, which: int) -> None:
    change, message = IMPORTS[case]
    manager = two_requests(which)
    tokens = cases.history(manager.config.geometry, 1, 70, 73)
    with pytest.raises(kvcm.InvalidArgument, match=rf"\[import_history\] .*{message}"):
        manager.import_history(1, *change(*tokens))
    assert manager.frontier(1) == 70
    manager.import_history(1, *tokens)
    manager.prepare_step([StepRequest(1, 73), StepRequest(2, 9)])
    take_step(manager)


@MANAGERS
def test_a_suspended_request_is_refused_by_its_id(which: int) -> None:
    manager = two_requests(which)
    manager.suspend_request(1)
    away = r"request 1 is suspended; resume it first"
    with pytest.raises(kvcm.InvalidState, match=rf"\[prepare_step\] {away}"):
        manager.prepare_step([StepRequest(2, 9), StepRequest(1, 70)])
    with pytest.raises(kvcm.InvalidState, match=rf"\[import_history\] {away}"):
        manager.import_history(1, *cases.history(manager.config.geometry, 1, 70, 73))
    manager.resume_request(1)
    manager.prepare_step([StepRequest(1, 70)])
    for request in (1, 2):
        with pytest.raises(kvcm.InvalidState, match=r"\[suspend_request\] a step is open; end or"):
            manager.suspend_request(request)
    manager.abort_step()
    manager.prepare_step([StepRequest(1, 70), StepRequest(2, 9)])
    take_step(manager)
