"""The device that a test's models and managers live on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make `build` and `stock_result` of tiny_glm use the device during the test.

    Without a GPU the cuda cases skip; with SPARSE_KVCM_REQUIRE_CUDA=1 that is a failure.
    """
    import sparse_kvcm as kvcm
    import tiny_glm

    if request.param == "cuda":
        missing = None
        if not tiny_glm.torch.cuda.is_available():
            missing = "torch finds no GPU"
        elif not kvcm.cuda_is_available():
            missing = kvcm.cuda_unavailable_reason()
        if missing and os.environ.get("SPARSE_KVCM_REQUIRE_CUDA") == "1":
            pytest.fail(f"SPARSE_KVCM_REQUIRE_CUDA=1, but {missing}")
        if missing:
            pytest.skip(missing)
    with tiny_glm.on_device(request.param):
        yield request.param
