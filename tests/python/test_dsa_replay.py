"""A draft model's turn: its buffers and mappings, then the target's again."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.dsa import DSACacheManager, IndexerMetadata, draft_replay  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402


def ready() -> tuple[IndexerMetadata, DSACacheManager]:
    """A target in a step of request 1, and a draft of one layer whose pages lie elsewhere."""
    target, draft = (
        DSACacheManager(cases.cache_config()),
        DSACacheManager(
            cases.cache_config(geometry=cases.geometry(num_hidden_layers=1, indexer_types=["full"]))
        ),
    )
    draft.add_request(9, 64)
    draft.import_history(9, *cases.history(draft.config.geometry, 9, 0, 40))
    for manager in (target, draft):
        manager.add_request(1, 64)
        manager.import_history(1, *cases.history(manager.config.geometry, 1, 0, 20))
    return IndexerMetadata(target, target.prepare_step([StepRequest(1, 20)])), draft


def test_the_draft_is_bound_with_mappings_of_its_own() -> None:
    metadata, draft = ready()
    target, step = metadata.manager, metadata.step
    before = step.slots["INDEX_KEY"].data.clone()
    with draft_replay(metadata, draft, [StepRequest(1, 20)]):
        assert metadata.manager is draft
        page = int(metadata.step.page_tables["INDEX_KEY"][0, 20 // 8])
        assert metadata.step.slots["INDEX_KEY"].data.tolist() == [page * 8 * 132 + 20 % 8 * 128]
        assert metadata.step.slots["INDEX_KEY"].data.tolist() != before.tolist()
        draft.write_index_keys(0, cases.keys(1, 0, [20]))
    assert metadata.manager is target
    assert metadata.step is step is target.step
    assert torch.equal(step.slots["INDEX_KEY"].data, before)
    assert draft.frontier(1) == 21
    target.end_step()


@pytest.mark.parametrize("history", [20, 19])
def test_the_target_is_restored_after_an_exception(history: int) -> None:
    """Of the draft's forward, or of its preparation: 19 is not what the draft has."""
    metadata, draft = ready()
    target, step = metadata.manager, metadata.step
    before = step.slots["INDEX_KEY"].data.clone()
    with (
        pytest.raises((ZeroDivisionError, ValueError)),
        draft_replay(metadata, draft, [StepRequest(1, history)]),
    ):
        raise ZeroDivisionError
    assert metadata.manager is target
    assert metadata.step is step is target.step
    assert torch.equal(step.slots["INDEX_KEY"].data, before)
    assert draft.step is None
    assert draft.frontier(1) == 20
    with draft_replay(metadata, draft, [StepRequest(1, 20)]):
        pass
    assert draft.frontier(1) == 21


def test_a_draft_whose_step_would_be_lost_is_refused() -> None:
    """The target itself, and one that replays already, at any depth."""
    metadata, draft = ready()
    target, step = metadata.manager, metadata.step

    def refused(one: Any) -> None:
        bound = metadata.manager, metadata.step
        with (
            pytest.raises(kvcm.InvalidArgument, match=r"\[draft_replay\] draft must be a DSA"),
            draft_replay(metadata, one, [StepRequest(1, 20)]),
        ):
            raise AssertionError
        assert (metadata.manager, metadata.step) == bound

    refused(target)
    refused(None)
    with draft_replay(metadata, draft, [StepRequest(1, 20)]):
        refused(draft)
        refused(target)
        _, other = ready()
        with draft_replay(metadata, other, [StepRequest(1, 20)]):
            refused(draft)
        assert metadata.step is draft.step is not None
    assert draft.frontier(1) == 21
    assert metadata.step is step is target.step
    target.end_step()
    assert target.frontier(1) == 21
