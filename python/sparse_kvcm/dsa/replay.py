"""Binding a draft model's buffers for as long as it replays, and the target's again afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.dsa.step_tensors import DsaStep
from sparse_kvcm.step import StepRequest


@dataclass
class IndexerMetadata:
    """What an indexer reads: whose buffers, and where tokens lie in them.

    Attributes
    ----------
    manager : DsaManager
        Of the buffers.
    step : DsaStep
        Its open step.
    """

    manager: DsaManager
    step: DsaStep


@contextmanager
def draft_replay(
    metadata: IndexerMetadata, draft: DsaManager, requests: Iterable[StepRequest]
) -> Iterator[IndexerMetadata]:
    """Bind a draft manager: its buffers, and mappings computed anew from its page tables.

    On exit, after an exception too, `metadata` is what it was, and the draft's step has ended or,
    after an exception, been dropped. The target's step stays open throughout.

    Parameters
    ----------
    metadata : IndexerMetadata
        Of the target; changed in place, since the model holds it.
    draft : DsaManager
        One that has no step open: not the target's, nor one that replays already.
    requests : iterable of StepRequest
        With the draft's histories.

    Raises
    ------
    InvalidArgument
        For another draft, whose step would be lost. Nothing has changed then.

    Examples
    --------
    ::

        with draft_replay(metadata, draft_manager, requests):
            draft_model(metadata)
    """
    if not isinstance(draft, DsaManager) or draft is metadata.manager or draft.step is not None:
        got = "one that is bound or has one" if isinstance(draft, DsaManager) else f"{draft!r:.40}"
        raise InvalidArgument(
            "[draft_replay] draft must be a DSA manager that is not bound and has no open step, "
            f"got {got}; end or abort its step first"
        )
    target = metadata.manager, metadata.step
    try:
        step = draft.prepare_step(requests)
        metadata.manager, metadata.step = draft, step
        yield metadata
        draft.end_step()
    except BaseException:
        draft.abort_step()
        raise
    finally:
        metadata.manager, metadata.step = target
