"""What DSA managers refuse, whatever their version."""

from __future__ import annotations

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402


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
    with pytest.raises(kvcm.InvalidArgument, match=r"index_keys of \[0, 1, 4\], .* \[0, 4\]"):
        manager.import_history(1, latents, {k: v for k, v in keys.items() if k != 1})
    with pytest.raises(kvcm.InvalidArgument, match=r"latents\[3\] must be \(3, 192\), got \(2"):
        manager.import_history(1, latents | {3: latents[3][:2]}, keys)
    with pytest.raises(kvcm.OutOfPages, match="no room for 101 tokens of request 1, at most 100"):
        manager.import_history(1, *cases.history(model, 1, 0, 101))
    manager.prepare_step([StepRequest(1, 0)])
    with pytest.raises(kvcm.InvalidArgument, match="of 0, 1, 4; got 2, which shares .* layer 1"):
        manager.select(2, torch.zeros(1, 4, dtype=torch.int32))
    manager.abort_step()
