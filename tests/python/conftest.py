"""Shared settings. Failing hypothesis examples print how to reproduce them.

A GPU machine without a network may lack pydantic, which planning alone needs: the header then says
that those tests are left out. Where the package is installed it is there.
"""

from __future__ import annotations

import importlib.util
import os

from hypothesis import HealthCheck, settings


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if not _has_gpu():  # Triton's functions run interpreted; it looks once, when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "sparse_kvcm",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("sparse_kvcm")

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
