"""A DeepSeek-V4 manager gives back what was written, of every type, resident and offloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


class Run:
    """Requests of one manager through steps."""

    def __init__(self, offloads: bool, seed: int = 0, **changes: Any) -> None:
        self.manager = cases.manager(offloads, **changes)
        self.reader = cases.Reader(self.manager, np.random.default_rng(seed))
        self.lengths: dict[int, int] = {}

    def add(self, request: int, prompt: int, most: int = 900) -> None:
        self.manager.add_request(request, most)
        history = cases.history(self.manager.config.geometry, request, prompt)
        self.manager.import_history(request, history)
        self.lengths[request] = prompt

    def open(self, padded: int | None = None) -> None:
        order = [StepRequest(one, n, batch_index=one) for one, n in self.lengths.items()]
        self.manager.prepare_step(order, padded_size=padded)

    def step(self, count: int = 1, padded: int | None = None) -> None:
        for _ in range(count):
            self.open(padded)
            self.reader.run()
            self.manager.end_step()
            for request in self.lengths:
                self.lengths[request] += 1


@MODES
@pytest.mark.parametrize("page", [128, 256])
def test_steps_read_what_was_written_over_pages_and_entries(offload: bool, page: int) -> None:
    run = Run(offload, tokens_per_block=page)
    run.add(1, 249)  # its window crosses a page, its entry of ratio 128 is whole within the run
    run.add(2, 381)
    run.add(3, 3)  # no entry at first
    run.step(14, padded=3)


@MODES
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 7, 8, 9, 39, 40, 41, 127, 128, 129, 255, 256])
def test_a_prompt_of_any_length_goes_on(offload: bool, prompt: int) -> None:
    run = Run(offload)
    run.add(5, prompt)
    run.step(9)


@MODES
def test_requests_come_go_suspend_and_resume(offload: bool) -> None:
    run = Run(offload, seed=3)
    run.add(1, 130)
    run.add(2, 500)
    run.step(5)
    run.add(3, 61)
    run.step(3, padded=3)
    waiting = run.lengths.pop(2)
    run.manager.suspend_request(2)
    run.step(6)
    run.manager.free_request(1)
    del run.lengths[1]
    run.manager.resume_request(2)
    run.lengths[2] = waiting
    run.add(4, 90)
    run.step(30)
    for request in list(run.lengths):
        run.manager.free_request(request)


@MODES
def test_a_failed_forward_is_followed_by_a_good_step(offload: bool) -> None:
    run = Run(offload, seed=4)
    run.add(1, 255)
    run.add(2, 259)
    run.step(2)
    run.open()
    step = run.manager.step
    assert step is not None
    run.manager.write_window(0, torch.full((2, 64), 55.0))
    run.manager.select(1, torch.full((2, cases.TOP_K), 3, dtype=torch.int32))
    run.step(6)  # prepares without a word about the other


@MODES
def test_a_step_may_run_in_several_forwards(offload: bool) -> None:
    run = Run(offload, seed=5)
    run.add(1, 130)
    run.add(2, 303)
    run.open()
    manager, model = run.manager, run.manager.config.geometry
    for place in (0, 1):
        request = manager.step.prepared.requests[place]
        at = slice(place, place + 1)
        names = torch.tensor([[2, -1, request.length // 4 - 1]], dtype=torch.int32)
        slots = manager.select(1, names, at)
        manager.write_entries(1, cases.C, run.reader.new(1, cases.C, 4)[at], at)
        found = manager.read(1, cases.C, slots)[0]
        wanted = cases.values(model, request.request_id, 1, cases.C, names[0, [0, 2]])
        assert torch.equal(found[[0, 2]], wanted)
        assert not found[1].any()
    manager.abort_step()


def test_a_prompt_computed_in_steps_equals_one_that_was_imported() -> None:
    """Windows of the step lie in scratch; what later steps read must not."""
    run = Run(False, max_num_tokens=400)
    manager, model = run.manager, run.manager.config.geometry
    manager.add_request(1, 900)
    whole = cases.history(model, 1, 390)
    manager.prepare_step([StepRequest(1, 0, 390, is_context=True)])
    assert any(manager.step.scratch.values())
    for layer, ratio in enumerate(model.compress_ratios):
        items = {kind: whole.items[layer, kind] for kind in cases.kinds_of(ratio)}
        manager.write_window(layer, items[cases.SWA])
        for kind in set(items) & set(cases.STATES):
            manager.write_states(layer, kind, items[kind][:, None])
        for kind in set(items) & {cases.C, cases.INDEX}:
            per_query = torch.full((390, items[kind].shape[1]), 77.0)
            per_query[ratio - 1 :: ratio] = items[kind]
            manager.write_entries(layer, kind, per_query)
        if ratio == 4:  # each query sees the entries up to itself
            names = torch.arange(390, dtype=torch.int32)[:, None] // 4 - 1
            found = manager.read(layer, cases.C, manager.select(layer, names))[:, 0]
            assert torch.equal(found[4:], items[cases.C][names[4:, 0].long()])
    manager.end_step()
    run.lengths[1] = 390
    run.step(9)


# --- what is refused ---


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
        ([StepRequest(1, 10, beam_width=2)], "beam_width" if offload else None),
    ):
        if message is not None:
            with pytest.raises(kvcm.InvalidArgument, match=message):
                run.manager.prepare_step(wrong)
    run.step(1)
    with pytest.raises(kvcm.OutOfPages, match="request 1"):
        run.open()
    assert run.manager.step is None
    assert run.manager.frontier(1) == 11


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


def test_only_what_the_next_token_reads_need_be_imported() -> None:
    run = Run(True)
    model = run.manager.config.geometry
    run.manager.add_request(1, 300)
    whole = cases.history(model, 1, 133)
    items = {}
    for (layer, kind), rows in whole.items.items():
        keep = len(rows)
        if kind is cases.SWA:
            keep = cases.WINDOW - 1
        elif kind in cases.STATES:  # one group of 4 is begun, the one before overlaps
            keep = 5
        items[layer, kind] = rows[len(rows) - keep :]
    run.manager.import_history(1, type(whole)(133, items))
    run.lengths[1] = 133
    run.step(8)


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


def test_nothing_stays_taken() -> None:
    run = Run(True)
    before = run.manager.store.manager.occupancy()
    run.add(1, 300)
    run.open()
    run.manager.free_request(1)
    run.manager.abort_step()
    after = run.manager.store.manager.occupancy()
    assert (after.free_host_pages, after.free_leases) == (
        before.free_host_pages,
        before.free_leases,
    )


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
