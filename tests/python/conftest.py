"""Shared settings. Failing hypothesis examples print how to reproduce them.

A GPU machine without a network may lack pydantic, which planning alone needs: the header then says
that those tests are left out. Where the package is installed it is there.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

import sparse_kvcm as kvcm

settings.register_profile(
    "sparse_kvcm",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("sparse_kvcm")

# Without a GPU Triton interprets. It reads this when it is imported, so before any test.
if not kvcm.cuda_is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

PLANS = importlib.util.find_spec("pydantic") is not None
collect_ignore_glob = (
    []
    if PLANS
    else [
        f"test_{name}.py"
        for name in (
            "base_manager",
            "cli",
            "config",
            "decode_worker",
            "factory*",
            "memory_limits",
            "models",
            "planner",
            "ranks",
            "readme",
            "sizing_*",
        )
    ]
)


def pytest_report_header() -> list[str]:
    """Name what is left out."""
    return (
        [] if PLANS else ["no pydantic: the tests of configuration, sizing and plans are left out"]
    )


@pytest.fixture
def gpu() -> str:
    """A GPU that the library and torch see, or a visible skip."""
    import sparse_kvcm as kvcm

    torch = pytest.importorskip("torch")
    if kvcm.cuda_is_available() and torch.cuda.is_available():
        return "cuda:0"
    if os.environ.get("SPARSE_KVCM_REQUIRE_CUDA"):
        pytest.fail("SPARSE_KVCM_REQUIRE_CUDA is set and there is no GPU")
    pytest.skip("no GPU")


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton's functions run: compiled on a GPU, else interpreted on the CPU."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    torch.set_num_threads(1)
    import sparse_kvcm as kvcm

    if kvcm.cuda_is_available() and torch.cuda.is_available():
        return "cuda:0"
    if os.environ.get("SPARSE_KVCM_REQUIRE_CUDA"):
        pytest.fail("SPARSE_KVCM_REQUIRE_CUDA is set and there is no GPU")
    return "cpu"


@pytest.fixture(scope="session")
def triton_gpu(triton_device: str) -> str:
    """The GPU; without one the test is skipped."""
    if triton_device == "cpu":
        pytest.skip("no GPU")
    return triton_device
