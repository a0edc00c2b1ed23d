"""A DeepSeek-V4 manager gives back what was written, of every type, resident and offloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
from sparse_kvcm.dsa.scatter import scatter as real_scatter  # noqa: E402

import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import access  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402
from v4_cases import Run  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


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


@pytest.mark.parametrize("end", ["end_step", "abort_step", None])
def test_a_selection_counts_for_its_step_alone(end: str | None) -> None:
    """Fails if a forward that failed, or one before, leaves the slots that it wrote to."""
    run = Run(True)
    run.add(1, 131)
    run.open()
    for layer in (1, 3):
        run.manager.select(layer, torch.zeros(1, 1, dtype=torch.int32))
    if end is not None:
        getattr(run.manager, end)()
    run.lengths[1] += end == "end_step"
    run.open()
    for layer in (1, 3):
        with pytest.raises(kvcm.InvalidState, match="needs a selection first"):
            run.manager.resolved(layer)
        with pytest.raises(kvcm.InvalidState, match="needs a selection first"):
            run.manager.write_entries(layer, cases.C, torch.zeros(1, 64))
    run.manager.abort_step()


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


def test_a_prompt_computed_in_steps_equals_one_that_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows of the step lie in scratch; what later steps read must not."""

    def scatter(pool: torch.Tensor, mapping: Any, *rest: Any, **options: Any) -> None:
        """No two tokens have one place: on a GPU any of them would win."""
        places = mapping.data[mapping.data >= 0]
        assert len(places.unique()) == len(places)
        real_scatter(pool, mapping, *rest, **options)

    monkeypatch.setattr(access, "scatter", scatter)
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


@MODES
def test_addresses_stay_and_padding_is_at_the_tail(offload: bool) -> None:
    """What a graph reads when it is replayed."""
    run = Run(offload)
    run.add(1, 126)
    seen = []
    for _ in range(5):
        run.open(padded=3)
        step = run.manager.step
        tensors = [step.rows, step.lengths, step.query_lengths, *step.tables.values()]
        buffers = [run.manager.get_buffers(1, kind) for kind in cases.AttentionType]
        seen.append([one.data_ptr() for one in [*tensors, *buffers]])
        tables = [one.data_ptr() for one in (step.rows, step.lengths, *step.tables.values())]
        assert len(set(tables)) == len(tables)
        assert step.rows.tolist() == [0, -1, -1]
        assert step.lengths.tolist() == [run.lengths[1] + 1, 0, 0]
        assert all(bool((table[1:] == -1).all()) for table in step.tables.values())
        run.reader.run()
        run.manager.end_step()
        run.lengths[1] += 1
    assert all(one == seen[0] for one in seen)


@MODES
def test_padding_has_neither_lengths_nor_rows_whoever_was_there_before(offload: bool) -> None:
    run = Run(offload)
    for request, prompt in ((1, 250), (2, 130), (3, 9)):
        run.add(request, prompt)
    run.step(1, padded=3)
    step = run.manager.prepare_step([StepRequest(2, 131)], padded_size=3)
    assert step.lengths.tolist() == step.query_lengths.tolist() == [132, 0, 0]
    assert step.rows.tolist()[1:] == [-1, -1]
    assert all(bool((table[1:] == -1).all()) for table in step.tables.values())
    assert bool((run.manager.rows(0, cases.SWA)[1:] == -1).all())
    run.manager.abort_step()


@MODES
def test_attention_gets_windows_and_entries_in_one_index_set(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 300)
    run.add(2, 30)
    run.open(padded=3)
    manager, model = run.manager, run.manager.config.geometry
    for layer, ratio in enumerate(model.compress_ratios):
        manager.write_window(layer, run.reader.new(layer, cases.SWA))
        selected = None
        if ratio == 4:
            names = torch.tensor([[70, -1, 0], [5, 6, -1], [-1, -1, -1]], dtype=torch.int32)
            selected = manager.select(layer, names)
        found = manager.attention_indices(layer, selected)
        window = manager.read(layer, cases.SWA, found.window.long())
        run.reader.check(layer, cases.SWA, window, lambda n: range(max(0, n - cases.WINDOW), n))
        if ratio == 4:
            assert torch.equal(found.compressed >= 0, names >= 0)
            rows = manager.read(layer, cases.C, found.compressed.long())
            assert torch.equal(rows[0, ::2], cases.values(model, 1, layer, cases.C, [70, 0]))
            assert torch.equal(rows[1, :2], cases.values(model, 2, layer, cases.C, [5, 6]))
        elif ratio == 128:
            assert (found.compressed >= 0).sum(1).tolist() == [2, 0, 0]
        else:
            assert found.compressed.shape == (3, 0)
    for layer, selected in ((0, torch.zeros(3, 1)), (1, None)):
        with pytest.raises(kvcm.InvalidArgument, match="ratio 4 alone"):
            manager.attention_indices(layer, selected)
    manager.abort_step()


def test_a_request_without_an_entry_selects_nothing_and_needs_no_host() -> None:
    run = Run(True)
    run.add(1, 1)
    for _ in range(2):
        run.open(padded=2)
        for layer in run.manager.config.geometry.history_layers:
            names = torch.zeros(2, 0, dtype=torch.int32)
            assert run.manager.select(layer, names).shape == (2, 0)
            counts = np.asarray(run.manager.resolved(layer).miss_counts)
            assert not counts[:2].any()
            assert not np.asarray(run.manager.resolved(layer).errors)[:2].any()
        run.manager.end_step()
        run.lengths[1] += 1
    assert run.manager.frontier(1) == 3


def test_scratch_takes_as_many_slots_as_the_storage_says() -> None:
    """Of a prompt's step: pages that no later step reads share slots."""
    run = Run(False, max_num_tokens=640)
    run.manager.add_request(1, 900)
    run.manager.prepare_step([StepRequest(1, 0, 640, is_context=True)])
    step, needed = run.manager.step, {}
    for (ratio, kind), (pool, *_) in run.manager.access.pools.items():
        for one in step.scratch[pool.layer_group]:
            # The fifth page is read later, but no input of a group of 128 that is whole.
            pages = 5 if kind.is_state and ratio == 128 else 4
            assert one.pages.end - one.pages.begin == pages, kind
            layer = run.manager.config.geometry.layers_of(ratio)[0]
            slots = pool.scratch_slots(layer, pages)
            needed[pool.layer_group] = max(slots, needed.get(pool.layer_group, 0))
    assert needed == {group: len(ones[0].slots) for group, ones in step.scratch.items() if ones}
    assert needed
    run.manager.abort_step()


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


@MODES
def test_an_aborted_step_gives_its_pages_back(offload: bool) -> None:
    run = Run(offload)
    run.add(1, 256)
    run.step()
    run.add(2, 256)
    (pool,) = run.manager.access.pools[4, cases.INDEX]

    def free() -> int:
        statistics = run.manager.store.storage.get_storage_statistics(0)
        return next(one.free for one in statistics if one.pool_group == pool.pool_group)

    before = free()
    run.open()  # the second request takes its third page
    assert free() == before - 1
    run.manager.abort_step()
    run.manager.suspend_request(2)  # with offload a row keeps its pages until its next resize
    if offload:
        run.manager.resume_request(2)
    assert free() == before


def free_slots(run: Run, level: int) -> list[int]:
    return [one.free for one in run.manager.store.storage.get_storage_statistics(level)]


@pytest.mark.parametrize("max_num_tokens", [None, 400])
def test_pages_of_a_suspended_resident_request_lie_on_the_host(max_num_tokens: int | None) -> None:
    run = Run(False, seed=6, cold_quota=8 * cases.MIB, max_num_tokens=max_num_tokens)
    nothing = free_slots(run, 0)
    run.add(1, 130)
    empty, host = free_slots(run, 0), free_slots(run, 1)
    run.add(2, 500)
    run.step(3)
    parked = run.lengths.pop(2)
    run.manager.suspend_request(2)
    assert free_slots(run, 0) == empty
    assert free_slots(run, 1) != host
    run.add(3, 500)  # takes what the other had
    run.step(3)
    run.manager.free_request(3)
    del run.lengths[3]
    run.manager.resume_request(2)
    assert free_slots(run, 1) == host
    run.lengths[2] = parked
    run.step(9)
    run.manager.suspend_request(2)
    for request in (1, 2):
        run.manager.free_request(request)
    assert (free_slots(run, 0), free_slots(run, 1)) == (nothing, host)


def test_without_room_on_either_side_a_resident_request_stays_where_it_is() -> None:
    run = Run(False, seed=7, cold_quota=cases.MIB, gpu_quota=1, max_batch_size=2)
    parked: dict[int, int] = {}
    refused = ""
    for request in range(1, 50):
        run.add(request, 500)
        run.step()
        try:
            run.manager.suspend_request(request)
        except kvcm.OutOfPages as error:
            refused = str(error)
            break
        parked[request] = run.lengths.pop(request)
    assert parked
    assert f"[suspend_request] the host has no room for the pages of request {request};" in refused
    run.step(3)  # it is where it was
    storage = run.manager.store.storage
    hog = storage.create_request_pages()
    length = 128
    while hog.resize(length, 0):
        length += 128
    request = next(iter(parked))
    with pytest.raises(
        kvcm.OutOfPages, match=rf"\[resume_request\] no pages .* request {request} "
    ):
        run.manager.resume_request(request)
    run.step()
    hog.close()
    run.manager.free_request(next(iter(run.lengths)))
    run.manager.resume_request(request)
    run.lengths = {request: parked[request]}
    run.step(5)
