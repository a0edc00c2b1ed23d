"""A step that one request has no page for takes none from the pools, whoever it was for."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

PAGE = 8


def free(manager: Any) -> int:
    return int(manager.store.storage.get_storage_statistics(0)[0].free)


def fill(manager: Any, left: int) -> None:
    """Requests of 200 tokens and less that leave so many pages."""
    request = 100
    while free(manager) > left:
        tokens = min(25, free(manager) - left) * PAGE
        manager.add_request(request, tokens)
        manager.import_history(request, *cases.history(manager.config.geometry, 1, 0, tokens))
        request += 1


@pytest.mark.parametrize("which", [0, 2], ids=["v1", "v2"])
def test_who_could_grow_gives_its_page_back(which: int) -> None:
    manager = cases.managers(gpu_quota=1, max_util_for_resume=1.0)[which]
    for request in (1, 2):
        manager.add_request(request, 200)
        tokens = cases.history(manager.config.geometry, request, 0, PAGE)
        manager.import_history(request, *tokens)
    fill(manager, left=1)
    requests = [StepRequest(request, PAGE) for request in (1, 2)]
    for _ in range(2):
        with pytest.raises(kvcm.OutOfPages, match=r"request 2 \(OUT_OF_PAGES\)"):
            manager.prepare_step(requests)
        assert free(manager) == 1
    manager.prepare_step(requests[1:])
    manager.end_step()
    assert free(manager) == 0
