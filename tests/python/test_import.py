"""Importing the package, and what it says of the machine."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import metadata

import pytest

import sparse_kvcm as kvcm
from sparse_kvcm import _core, ops


def test_import_brings_in_no_torch() -> None:
    code = "import sparse_kvcm, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist_and_are_unique() -> None:
    for module in (kvcm, ops):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_version_is_the_distribution_s() -> None:
    try:
        version = metadata.version("sparse_kvcm")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert kvcm.__version__ == version


def test_reason_is_given_exactly_when_cuda_is_not_available() -> None:
    assert kvcm.cuda_is_available() == (kvcm.cuda_unavailable_reason() == "")


def test_exceptions_derive_from_the_nearest_builtin() -> None:
    assert issubclass(kvcm.InvalidArgument, ValueError)
    for error in (kvcm.InvalidState, kvcm.OutOfPages, kvcm.NotAvailable):
        assert issubclass(error, RuntimeError)


@pytest.mark.parametrize("module", [_core, ops], ids=lambda module: str(module.__name__))
def test_examples_in_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


def test_objects_that_globals_hold_at_exit_are_not_reported_as_leaks() -> None:
    code = """
import numpy as np, sparse_kvcm as kvcm
group = kvcm.SelectionGroupConfig([0], 4, kvcm.UnitLayout([8]))
manager = kvcm.KvCacheManager(kvcm.KvCacheManagerConfig(
    groups=[group], cached_slots=64, window_slots=64, arena_pages=2, host_pages=2, max_leases=1))
arena, batch, cache = manager.arena(0), manager.create_batch(1, 200), manager.create_kv_cache(200)
cache.resume()
batch.add(cache)
batch.publish()
out = batch.resolve(0, np.zeros(1, np.int32), np.zeros((1, 2), np.int32))
errors = batch.take_errors()
try:
    batch.add(None)
except kvcm.InvalidArgument as error:
    kept = error
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stderr == b""
