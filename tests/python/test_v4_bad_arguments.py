"""Each call of a DeepSeek-V4 manager refuses bad input by name, and nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import DeepseekV4History  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402
from v4_cases import INDEX, STATES, SWA, C, Run  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
KV = STATES[0]
Call = Callable[[Any], Any]


def zeros(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


# --- in an open step of two queries; layers have the ratios 0, 4, 128, 4, 128 ---

IN_A_STEP: dict[str, tuple[Call, str]] = {
    "a layer past the last": (lambda m: m.rows(5, SWA), r"\[rows\] layer .* \[0, 4\], got 5"),
    "a layer before the first": (lambda m: m.get_buffers(-1, SWA), r"\[get_buffers\] .* got -1"),
    "a layer's name": (lambda m: m.write_window("x", zeros(2, 64)), r"\[write_window\] .*'x'"),
    "no layer": (lambda m: m.attention_indices(None), r"\[attention_indices\] layer .* got None"),
    "a bool": (lambda m: m.select(True, ints(2, 1)), r"\[select\] layer must be .* got True"),
    "a huge layer": (lambda m: m.resolved(2**70), r"\[resolved\] layer must be an int in"),
    "select at 128": (lambda m: m.select(2, ints(2, 1)), r"INDEXER_COMPRESS, of \[1, 3\], got 2"),
    "select at 0": (lambda m: m.select(0, ints(2, 1)), r"INDEXER_COMPRESS, of \[1, 3\], got 0"),
    "resolved at 128": (lambda m: m.resolved(4), r"INDEXER_COMPRESS, of \[1, 3\], got 4"),
    "rows of entries at 0": (lambda m: m.rows(0, C), r"COMPRESS, of \[1, 2, 3, 4\], got 0"),
    "index keys at 128": (
        lambda m: m.write_entries(2, INDEX, zeros(2, 32)),
        r"\[write_entries\] layer must be one with INDEXER_COMPRESS, of \[1, 3\], got 2",
    ),
    "states at 0": (lambda m: m.read_states(0, KV, 1), r"COMPRESSOR_KV, of \[1, 2, 3, 4\], got 0"),
    "a type's name": (lambda m: m.get_buffers(1, "SWA"), r"kind must be one of .* got 'SWA'"),
    "a type's number": (lambda m: m.rows(1, 5), r"\[rows\] kind must be one of .* got 5"),
    "rows of states": (lambda m: m.rows(1, KV), r"\[rows\] kind must be one of .* SWA, COMPRESS,"),
    "windows as entries": (
        lambda m: m.write_entries(1, SWA, zeros(2, 64)),
        r"\[write_entries\] kind must be one of AttentionType COMPRESS, INDEXER_COMPRESS, got",
    ),
    "windows as states": (
        lambda m: m.write_states(1, SWA, zeros(2, 1, 64)),
        r"\[write_states\] kind must be one of AttentionType COMPRESSOR_KV,",
    ),
    "entries as states": (lambda m: m.read_states(1, C, 1), r"\[read_states\] kind must be one of"),
    "a narrow window": (lambda m: m.write_window(0, zeros(2, 63)), r"SWA of layer 0 .*\(2, 64\)"),
    "too few values": (lambda m: m.write_window(0, zeros(1, 64)), r"\(2, 64\), got \(1, 64\)"),
    "too many values": (lambda m: m.write_entries(2, C, zeros(3, 64)), r"\(2, 64\), got \(3, 64\)"),
    "one row of values": (lambda m: m.write_window(0, zeros(64)), r"\(2, 64\), got \(64,\)"),
    "integers": (lambda m: m.write_window(0, ints(2, 64)), r"must be float, got torch.int32"),
    "complex values": (
        lambda m: m.write_window(0, zeros(2, 64, dtype=torch.complex64)),
        "must be float, got torch.complex64",
    ),
    "a NumPy array": (lambda m: m.write_window(0, np.zeros((2, 64))), "torch.Tensor, got ndarray"),
    "no values": (lambda m: m.write_window(0, None), "torch.Tensor, got NoneType"),
    "values elsewhere": (lambda m: m.write_window(0, zeros(2, 64).to("meta")), "on cpu, got meta"),
    "flat states": (
        lambda m: m.write_states(1, KV, zeros(2, 128)),
        r"COMPRESSOR_KV of layer 1 must be \(2, m, 128\), got \(2, 128\)",
    ),
    "states of one series": (
        lambda m: m.write_states(3, KV, zeros(2, 1, 64)),
        r"must be \(2, m, 128\), got \(2, 1, 64\)",
    ),
    "too many states": (lambda m: m.write_states(1, KV, zeros(2, 9, 128)), r"\[write_states\] .*9"),
    "no states": (lambda m: m.read_states(1, KV, 0), r"\[read_states\] .* newest 8, got 0"),
    "half a state": (lambda m: m.read_states(1, KV, 1.5), r"count must be an int, got 1.5"),
    "states to come": (lambda m: m.read_states(1, KV, 1, -1), "within the newest 8, got 1 behind"),
    "a wide selection": (lambda m: m.select(1, ints(2, 17)), "at most top-k 16 columns, got 17"),
    "a selection too few": (lambda m: m.select(1, ints(1, 4)), r"\(2, k\), got \(1, 4\)"),
    "a flat selection": (lambda m: m.select(1, ints(2)), r"\(2, k\), got \(2,\)"),
    "a float selection": (lambda m: m.select(1, zeros(2, 4)), "must be int32, got torch.float32"),
    "a long selection": (lambda m: m.select(1, ints(2, 4).long()), "be int32, got torch.int64"),
    "no selection": (lambda m: m.select(1, None), "must be a dense torch.Tensor, got None"),
    "nothing selected": (lambda m: m.attention_indices(1), "at ratio 4 alone, layer 1 has ratio 4"),
    "something at 128": (lambda m: m.attention_indices(2, ints(2, 1)), "layer 2 has ratio 128"),
    "of one query": (lambda m: m.attention_indices(1, ints(1, 3)), r"\(2, k\), got \(1, 3\)"),
    "a negative width": (lambda m: m.rows(0, SWA, width=-1), r"width .* in \[0, 40\], got -1"),
    "more than a window": (lambda m: m.rows(0, SWA, width=41), r"width .* in \[0, 40\], got 41"),
    "more than there can be": (lambda m: m.rows(2, C, width=8), r"width .* in \[0, 7\], got 8"),
    "half a column": (lambda m: m.rows(0, SWA, width=1.5), "width must be an int .* got 1.5"),
    "float rows": (lambda m: m.read(0, SWA, zeros(2, 1)), "rows must be int32 or int64"),
    "a query too many": (lambda m: m.rows(0, SWA, [2]), r"at must be an int in \[0, 1\], got 2"),
    "a query from the end": (lambda m: m.select(1, ints(1, 1), [-1]), r"in \[0, 1\], got -1"),
    "a query twice": (lambda m: m.select(1, ints(2, 1), [0, 0]), "name a query once"),
    "a query's name": (lambda m: m.rows(0, SWA, "x"), "at must be a slice or a list"),
    "a tuple of queries": (lambda m: m.rows(0, SWA, (0, 1)), "a list of queries, got tuple"),
    "queries backwards": (lambda m: m.rows(0, SWA, slice(None, None, -1)), "step >= 1, got slice"),
    "a slice of text": (lambda m: m.select(1, ints(2, 1), slice("a", None)), "slice of ints"),
    "a tensor of queries": (lambda m: m.rows(0, SWA, torch.tensor([0])), "a list of queries, got"),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("case", IN_A_STEP)
def test_a_call_of_a_step_is_refused_and_the_step_goes_on(case: str, offload: bool) -> None:
    call, message = IN_A_STEP[case]
    run = Run(offload)
    run.add(1, 130)
    run.add(2, 251)
    run.open()
    with pytest.raises(kvcm.InvalidArgument, match=message):
        call(run.manager)
    run.reader.run()
    run.manager.end_step()
    assert [run.manager.frontier(request) for request in (1, 2)] == [131, 252]


def test_values_go_to_the_queries_that_were_selected_for() -> None:
    run = Run(True)
    run.add(1, 130)
    run.add(2, 251)
    run.open()
    run.manager.select(1, ints(1, 1) - 1, slice(0, 1))
    with pytest.raises(
        kvcm.InvalidArgument, match=r"that of the layer's select, slice\(0, 1, None"
    ):
        run.manager.write_entries(1, C, zeros(1, 64), slice(1, 2))
    run.manager.abort_step()
    run.step(2)


@MODES
def test_a_selection_of_entries_that_are_not_whole_has_no_rows(offload: bool) -> None:
    """Such as of a row that was padding; the device says so a step later where it resolves."""
    run = Run(offload)
    run.add(1, 133)
    run.open(padded=2)
    names = torch.tensor([[33, 32, -7, 2**24, 0], [0, 1, 2, 3, 4]], dtype=torch.int32)
    slots = run.manager.select(1, names)
    assert (slots >= 0).tolist() == [[False, True, False, False, True], [False] * 5]
    run.manager.abort_step()
    if offload:
        from sparse_kvcm.dsa import StepFaultError

        with pytest.raises(StepFaultError, match="RANGE"):
            run.open()
    run.step(2)


# --- a step's requests, beside a request of 133 tokens of at most 300 ---

REQUESTS: dict[str, tuple[Any, Any, str]] = {
    "none": (None, {}, "requests must be StepRequests, got None"),
    "text": ("ab", {}, "requests must be StepRequests, got 'a'"),
    "ids": ([1], {}, "requests must be StepRequests, got 1"),
    "twice": ([StepRequest(1, 133)] * 2, {}, "request 1 must be named once"),
    "an unknown one": ([StepRequest(1, 133), StepRequest(77, 0)], {}, "request 77 .* add it"),
    "too many": ([StepRequest(i, 0) for i in range(4)], {}, "at most 3, got 4"),
    "history behind": ([StepRequest(1, 132)], {}, "must be 133, .* got 132"),
    "history ahead": ([StepRequest(1, 134)], {}, "must be 133, .* got 134"),
    "a float history": ([StepRequest(1, 133.0)], {}, "history of request 1 must be an int"),
    "a text history": ([StepRequest(1, "133")], {}, "must be an int, got '133'"),
    "nothing new": ([StepRequest(1, 133, 0)], {}, "new_tokens of request 1 must be >= 1, got 0"),
    "a float more": ([StepRequest(1, 133, 1.0)], {}, "new_tokens of request 1 must be an int"),
    "beams": ([StepRequest(1, 133, beam_width=2)], {}, "beam_width of request 1 must be 1, got 2"),
    "a place": ([StepRequest(1, 133, batch_index="x")], {}, "batch_index of request 1 .* got 'x'"),
    "narrow": ([StepRequest(1, 133)], {"padded_size": 0}, r"padded_size .*\[1 requests, 3\]"),
    "wide": ([StepRequest(1, 133)], {"padded_size": 4}, "got 4"),
    "half a row": ([StepRequest(1, 133)], {"padded_size": 1.5}, "padded_size must be .* got 1.5"),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("case", REQUESTS)
def test_a_batch_is_refused_and_nothing_has_changed(case: str, offload: bool) -> None:
    requests, options, message = REQUESTS[case]
    run = Run(offload)
    run.add(1, 133, most=300)
    with pytest.raises(kvcm.InvalidArgument, match=message):
        run.manager.prepare_step(requests, **options)
    assert run.manager.step is None
    assert run.manager.frontier(1) == 133
    run.step(2)


@MODES
def test_tokens_beyond_a_request_s_most_are_refused_by_request(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 133, most=134)
    run.step()
    for more in (1,) if offload else (1, 167, 10**9):
        with pytest.raises(kvcm.OutOfPages, match=r"request 1 \(at most 134 tokens\)"):
            run.manager.prepare_step([StepRequest(1, 134, more)])
    assert run.manager.frontier(1) == 134


# --- requests ---


@MODES
@pytest.mark.parametrize("wrong", [None, "a", 1.5, True])
def test_an_id_is_an_integer(offload: bool, wrong: Any) -> None:
    run = Run(offload)
    whole = cases.history(run.manager.config.geometry, 1, 5)
    for name, call in (
        ("add_request", lambda: run.manager.add_request(wrong, 10)),
        ("import_history", lambda: run.manager.import_history(wrong, whole)),
        ("free_request", lambda: run.manager.free_request(wrong)),
        ("suspend_request", lambda: run.manager.suspend_request(wrong)),
        ("resume_request", lambda: run.manager.resume_request(wrong)),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=rf"\[{name}\] request_id must be an int"):
            call()
    run.add(1, 130)
    run.step()


@MODES
def test_an_unknown_or_doubled_request_is_refused(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 130)
    run.step()
    manager = run.manager
    whole = cases.history(manager.config.geometry, 77, 5)
    for name, call in (
        ("import_history", lambda: manager.import_history(77, whole)),
        ("free_request", lambda: manager.free_request(77)),
        ("suspend_request", lambda: manager.suspend_request(77)),
        ("resume_request", lambda: manager.resume_request(77)),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=rf"\[{name}\] request_id .* got 77"):
            call()
    assert manager.frontier(77) is None
    with pytest.raises(kvcm.InvalidArgument, match="request_id 1 must be a new one"):
        manager.add_request(1, 900)
    for wrong in (0, -1, 901, 2**70, "x", None, 2.5, True):
        with pytest.raises(kvcm.InvalidArgument, match=r"max_tokens must be an int in \[1, 900\]"):
            manager.add_request(2, wrong)
        assert manager.frontier(2) is None
    run.step()
    manager.free_request(1)
    with pytest.raises(kvcm.InvalidArgument, match=r"\[free_request\] request_id .* got 1"):
        manager.free_request(1)
    run.lengths.clear()
    run.add(1, 250)  # the id is free again
    run.step(2)


@MODES
def test_a_suspended_request_takes_no_part_until_it_is_resumed(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 130)
    run.add(2, 30)
    run.step()
    run.manager.suspend_request(1)
    run.manager.suspend_request(1)  # says nothing new
    with pytest.raises(kvcm.InvalidState, match="suspended; resume it"):
        run.open()
    assert run.manager.step is None
    run.manager.resume_request(1)
    run.manager.resume_request(1)
    run.step(2)


@MODES
def test_calls_outside_of_a_step_are_refused_by_name(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 130)
    manager = run.manager
    for name, call in (
        ("end_step", manager.end_step),
        ("select", lambda: manager.select(1, ints(1, 1))),
        ("attention_indices", lambda: manager.attention_indices(0)),
        ("rows", lambda: manager.rows(0, SWA)),
        ("read", lambda: manager.read(0, SWA, ints(1, 1))),
        ("write_window", lambda: manager.write_window(0, zeros(1, 64))),
        ("write_entries", lambda: manager.write_entries(2, C, zeros(1, 64))),
        ("write_states", lambda: manager.write_states(2, KV, zeros(1, 1, 64))),
        ("read_states", lambda: manager.read_states(2, KV, 1)),
    ):
        with pytest.raises(kvcm.InvalidState, match=rf"\[{name}\] no step is open"):
            call()
    with pytest.raises(kvcm.InvalidState, match=r"\[resolved\] layer 1 "):
        manager.resolved(1)
    run.step()
    run.open()
    with pytest.raises(kvcm.InvalidState, match="step"):
        manager.suspend_request(1)
    manager.add_request(2, 20)
    whole = cases.history(manager.config.geometry, 2, 9)
    with pytest.raises(kvcm.InvalidState, match=r"\[import_history\] a step is open"):
        manager.import_history(2, whole)
    run.reader.run()
    manager.end_step()
    with pytest.raises(kvcm.InvalidState, match=r"\[end_step\] no step is open"):
        manager.end_step()
    manager.import_history(2, whole)
    run.lengths = {1: 132, 2: 9}
    run.step(2)


# --- histories, of 133 tokens for a request of at most 300 ---

ITEMS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a NumPy array": (lambda x: x.numpy(), "torch.Tensor, got ndarray"),
    "a list": (lambda x: x.tolist(), "torch.Tensor, got list"),
    "nothing": (lambda x: None, "torch.Tensor, got NoneType"),
    "integers": (lambda x: x.int(), "must be float, got torch.int32"),
    "bools": (lambda x: x.bool(), "must be float, got torch.bool"),
    "complex ones": (lambda x: x.to(torch.complex64), "must be float, got torch.complex64"),
    "sparse ones": (lambda x: x.to_sparse(), "dense torch.Tensor, got torch.sparse_coo"),
    "no memory": (lambda x: x.to("meta"), "must be on a device, got meta"),
    "a batch": (lambda x: x[None], "for 133 tokens, got"),
    "one row": (lambda x: x[0], "for 133 tokens, got"),
    "narrow ones": (lambda x: x[:, 1:], "for 133 tokens, got"),
    "too many": (lambda x: torch.cat([x, x[:1]]), "for 133 tokens, got"),
    "too few": (lambda x: x[:0], "for 133 tokens, got"),
}
KEYS = [(0, SWA), (1, C), (1, INDEX), (2, C), (1, KV), (4, STATES[1])]


@MODES
@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key[1].name}-{key[0]}")
def test_items_that_do_not_fit_leave_a_request_empty(key: Any, offload: bool) -> None:
    run = Run(offload)
    run.manager.add_request(1, 300)
    whole = cases.history(run.manager.config.geometry, 1, 133)
    for change, message in ITEMS.values():
        items = dict(whole.items) | {key: change(whole.items[key])}
        name = rf"\[import_history\] {key[1].name} of layer {key[0]} .*"
        with pytest.raises(kvcm.InvalidArgument, match=name + message):
            run.manager.import_history(1, DeepseekV4History(133, items))
        assert run.manager.frontier(1) == 0
    run.manager.import_history(1, whole)
    run.lengths[1] = 133
    run.step(3)


@MODES
def test_histories_that_do_not_fit_leave_a_request_empty(offload: bool) -> None:
    run = Run(offload)
    run.manager.add_request(1, 300)
    whole = cases.history(run.manager.config.geometry, 1, 133)
    items = dict(whole.items)
    other_ratio = items | {(3, C): cases.values(run.manager.config.geometry, 1, 3, C, range(1))}
    for wrong, message in (
        (None, "history must be a DeepseekV4History"),
        (DeepseekV4History(133, None), "with a mapping of items"),  # type: ignore[arg-type]
        (DeepseekV4History(0, items), "tokens must be an int >= 1, got 0"),
        (DeepseekV4History(133.0, items), "tokens must be an int"),  # type: ignore[arg-type]
        (DeepseekV4History(True, items), "tokens must be an int"),
        (DeepseekV4History(301, items), "tokens must be at most 300, .* got 301; add it with more"),
        (DeepseekV4History(132, items), "must be .* for 132 tokens"),
        (DeepseekV4History(133, items | {(0, C): items[1, C]}), "layer 0, COMPRESS"),
        (DeepseekV4History(133, items | {(5, SWA): items[0, SWA]}), "layer 5, SWA"),
        (DeepseekV4History(133, items | {"x": items[0, SWA]}), "'x'"),  # type: ignore[dict-item]
        (DeepseekV4History(133, other_ratio), r"COMPRESS of layer 3 must be \(33 to 33, 64\)"),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=message):
            run.manager.import_history(1, wrong)  # type: ignore[arg-type]
        assert run.manager.frontier(1) == 0
    run.manager.import_history(1, whole)
    run.lengths[1] = 133
    run.step(3)


@MODES
def test_an_import_that_fails_part_way_leaves_the_request_empty(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when a GPU runs out of memory."""
    run = Run(offload)
    run.add(2, 90)
    run.manager.add_request(1, 300)
    whole = cases.history(run.manager.config.geometry, 1, 133)
    real, calls = run.manager.access.import_items, []

    def fail(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("on purpose")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run.manager.access, "import_items", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            run.manager.import_history(1, whole)
    assert run.manager.frontier(1) == 0
    run.step()
    run.manager.import_history(1, whole)
    run.lengths[1] = 133
    run.step(3)
