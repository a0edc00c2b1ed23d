"""The scripts refuse what they do not know before they set anything up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("demo", "nothing", 'there is no demo "nothing"; there are: glm5'),
        ("test", "--slow", "unknown option --slow; the only one is --fast"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    script: str, argument: str, message: str
) -> None:
    run = subprocess.run(
        [ROOT / "scripts" / script, argument], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"scripts/{script}: {message}")


def test_bench_writes_a_record_per_case_with_machine_date_and_commit(tmp_path: Path) -> None:
    figures = {"bench": "b", "case": "c", "value": 1.5, "unit": "ms", "limit": None, "share": None}
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(figures)}'\n")
    program.chmod(0o755)
    target = tmp_path / "folder" / "records.json"

    command = [sys.executable, ROOT / "scripts" / "run_bench.py", program, "--json", target]
    run = subprocess.run(command, capture_output=True, text=True, check=True)

    [record] = json.loads(target.read_text())
    assert list(record) == [*figures, "device", "date", "commit"]
    assert record | figures == record
    assert "1.5" in run.stdout


def test_bench_refuses_an_unwritable_file_before_it_runs_anything(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)

    for target in (tmp_path, program / "records.json"):
        command = [sys.executable, ROOT / "scripts" / "run_bench.py", program, "--json", target]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert f"error: --json must be a writable file, got {target}: " in run.stderr
        assert not ran.exists()


def test_bench_that_fails_leaves_no_file(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    target = tmp_path / "records.json"

    command = [sys.executable, ROOT / "scripts" / "run_bench.py", program, "--json", target]
    assert subprocess.run(command, check=False).returncode == 3
    assert not target.exists()
