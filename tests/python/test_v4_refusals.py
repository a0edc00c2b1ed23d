"""What a DeepSeek-V4 manager refuses, by name, and that it goes on afterwards."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402
from v4_cases import Run  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


def test_an_offloading_manager_takes_no_prompt_in_a_step() -> None:
    run = Run(True)
    run.manager.add_request(1, 20)
    with pytest.raises(kvcm.InvalidArgument, match="must decode"):
        run.manager.prepare_step([StepRequest(1, 0, 3, is_context=True)])


@MODES
def test_a_batch_that_cannot_be_changes_nothing(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 10, most=11)
    for wrong, message in (
        ([StepRequest(1, 10), StepRequest(1, 10)], "named once"),
        ([StepRequest(9, 0)], "add it"),
        ([StepRequest(1, 9)], "must be 10"),
        ([StepRequest(1, 10, beam_width=2)], "beam_width of request 1 must be 1, got 2"),
    ):
        with pytest.raises(kvcm.InvalidArgument, match=message):
            run.manager.prepare_step(wrong)
    run.step(1)
    with pytest.raises(kvcm.OutOfPages, match="request 1"):
        run.open()
    assert run.manager.step is None
    assert run.manager.frontier(1) == 11


@MODES
def test_a_request_that_cannot_grow_leaves_the_others_as_they_were(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 383)
    run.add(2, 10, most=11)
    run.step(1)  # the last token of a page, and the last one that the other may have
    with pytest.raises(kvcm.OutOfPages, match="request 2"):
        run.open()
    run.manager.free_request(2)
    del run.lengths[2]
    run.step(3)


@MODES
def test_a_graph_may_be_as_wide_as_there_are_rows(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 10)
    for size in (0, 4):
        with pytest.raises(kvcm.InvalidArgument, match=r"in \[1 requests, 3\]"):
            run.open(padded=size)
    run.step(2, padded=3)


@MODES
def test_a_layer_without_a_type_is_refused_with_those_that_have_it(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 20)
    with pytest.raises(kvcm.InvalidState, match="no step is open"):
        run.manager.select(1, torch.zeros(1, 1, dtype=torch.int32))
    run.open()
    with pytest.raises(kvcm.InvalidArgument, match=r"of \[1, 3\], got 2"):
        run.manager.select(2, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(kvcm.InvalidArgument, match=r"INDEXER_COMPRESS, of \[1, 3\], got 0"):
        run.manager.get_buffers(0, cases.INDEX)
    with pytest.raises(kvcm.InvalidArgument, match="newest 8, got 8 behind 1"):
        run.manager.read_states(1, cases.STATES[0], 8, 1)
    with pytest.raises(kvcm.InvalidArgument, match=r"SWA of layer 0 must be \(1, 64\)"):
        run.manager.write_window(0, torch.zeros(1, 63))
    if offload:
        with pytest.raises(kvcm.InvalidState, match="call select"):
            run.manager.write_entries(1, cases.C, torch.zeros(1, 64))
        with pytest.raises(kvcm.InvalidArgument, match="is offloaded"):
            run.manager.rows(1, cases.C)


@MODES
def test_a_history_that_is_not_whole_is_refused_by_layer_and_type(offload: bool) -> None:
    run = Run(offload)
    model = run.manager.config.geometry
    run.manager.add_request(1, 300)
    history = cases.history(model, 1, 133)
    for key, rows, message in (
        ((1, cases.INDEX), slice(1, None), "INDEXER_COMPRESS of layer 1"),
        ((2, cases.SWA), slice(133 - cases.WINDOW + 2, None), "SWA of layer 2"),
        ((3, cases.STATES[1]), slice(133 - 4, None), "COMPRESSOR_SCORE of layer 3"),
    ):
        items = dict(history.items)
        items[key] = items[key][rows]
        with pytest.raises(kvcm.InvalidArgument, match=message):
            run.manager.import_history(1, type(history)(133, items))
    with pytest.raises(kvcm.InvalidArgument, match="one too many or too few: layer 0, SWA"):
        run.manager.import_history(1, type(history)(133, {}))
    run.manager.import_history(1, history)
    with pytest.raises(kvcm.InvalidState, match="imported once"):
        run.manager.import_history(1, history)
    run.lengths[1] = 133
    run.step(4)


def test_an_import_without_room_leaves_the_request_empty() -> None:
    sizes = cases.OffloadSizes(32, host_pages=2)
    run = Run(True, offload=sizes)
    run.manager.add_request(1, 900)
    with pytest.raises(kvcm.OutOfPages):
        run.manager.import_history(1, cases.history(run.manager.config.geometry, 1, 600))
    assert run.manager.frontier(1) == 0
    run.manager.free_request(1)
    run.add(2, 200, most=250)
    run.step(5)


def test_features_are_refused_by_name() -> None:
    from sparse_kvcm.deepseek_v4 import choose_version
    from sparse_kvcm.dsa import ManagerFeatures

    assert choose_version("auto") == choose_version(True) == 2
    with pytest.raises(kvcm.InvalidArgument, match="only version 2"):
        choose_version(False)
    with pytest.raises(kvcm.InvalidArgument, match="auto or true"):
        choose_version("v2")  # type: ignore[arg-type]
    for features, name in (
        (ManagerFeatures(has_connector=True), "connectors"),
        (ManagerFeatures(beam_width=4), "beam width"),
        (ManagerFeatures(context_parallel="star"), "star"),
        (ManagerFeatures(context_parallel="helix"), "helix"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            DeepseekV4CacheManager(cases.cache_config(True), features)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_block": 64}, "128 or 256"),
        ({"max_seq_len": 5000}, "max_seq_len"),
        ({"avg_seq_len": 901}, "avg_seq_len"),
        ({"max_num_tokens": 8}, "decodes only"),
        ({"offload": cases.OffloadSizes(8, 10)}, "top-k 16"),
    ],
)
def test_a_wrong_configuration_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=message):
        cases.cache_config(True, **changes)
