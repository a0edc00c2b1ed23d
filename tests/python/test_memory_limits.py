"""Under real limits, of a control group and of locked memory, nothing over them is taken."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sizing_cases import MIB

LIMIT = 512 * MIB
CHILD = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
import sparse_kvcm as kvcm
from sparse_kvcm.sizing import HostTerm, allocate, host_memory, measure, size_worker
from sizing_cases import GIB, MIB, Machine, tiny_dsa, worker_config

limit = 512 * MIB
memory = host_memory()
assert memory.binding is HostTerm.GROUP, memory
assert memory.effective < limit < memory.terms[HostTerm.AVAILABLE], memory
machine = Machine(32 * MIB)
sizing = size_worker(worker_config(100, 20_000, dtype="bf16"), tiny_dsa(), Machine(GIB))
assert sizing.host.total_bytes <= memory.automatic, (sizing.host, memory)
assert sizing.capacity.binding == "host history", sizing.capacity
assert measure(allocate(sizing))["host history"] == sizing.host.history_bytes
try:
    size_worker(worker_config(1, 20_000, {"host_history_size": limit}), tiny_dsa(), machine)
except kvcm.InvalidArgument as error:
    assert "control group" in str(error), error
    print("refused")
"""

LOCKED = """
import os, resource
from sizing_cases import MIB, Machine, tiny_dsa, worker_config
from sparse_kvcm.base_manager import BaseKvCacheManager

resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.geteuid() == 0:
    os.setuid(65534)  # CAP_IPC_LOCK, which lifts the limit, goes with root
for offload in ({}, {"host_history_size": 64 * MIB}):
    try:
        BaseKvCacheManager(worker_config(1, 1000, offload), tiny_dsa(), Machine(64 * MIB))
    except ValueError as error:
        print(error)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of `LIMIT` bytes; skips where none may be made."""
    parents = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ]
    for parent, limit in parents:
        folder = parent / f"sparse_kvcm_test_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(LIMIT))
                yield folder
                return
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
    pytest.skip("no control group may be made here; fixtures stand for it in test_sizing_host.py")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )


def test_nothing_over_the_limit_of_a_control_group_is_taken(group: Path) -> None:
    result = run(CHILD, str(group))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "refused\n"


def test_a_process_that_may_lock_64_kib_is_told_of_ulimit() -> None:
    result = run(LOCKED)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line, field in zip(
        lines, ("host memory must be >=", "host_history_size must be <="), strict=True
    ):
        assert field in line
        assert "52428 B" in line  # 0.8 of 64 KiB
        assert "ulimit -l" in line
