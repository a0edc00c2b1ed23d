"""The scripts refuse what they do not know before they set anything up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("demo", "nothing", 'there is no demo "nothing"; there are: attention disaggregated glm5'),
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


def sweep_point(row_bytes: int, gap_kib: int, in_flight: int, us: float) -> dict[str, object]:
    return {
        "row_bytes": row_bytes,
        "gap_bytes": gap_kib * 1024,
        "run": 1,
        "in_flight": in_flight,
        "present": in_flight == 320,
        "us": us,
    }


def test_tune_writes_the_rows_in_flight_that_lose_least(tmp_path: Path) -> None:
    """Of 576 B, 208 rows lose 20 % in all, 320 lose 30 %; of the others 512 lose least."""
    times = {
        (576, 64): {208: 120.0, 320: 100.0, 512: 110.0},
        (576, 256): {208: 90.0, 320: 117.0, 512: 150.0},
        (2304, 64): {208: 200.2, 320: 200.1, 512: 200.0},
        (2304, 256): {208: 199.9, 320: 200.1, 512: 200.0},
        (4608, 256): {208: 300.0, 320: 290.0, 512: 280.0},
    }
    points = [
        sweep_point(row_bytes, gap, in_flight, us)
        for (row_bytes, gap), all_us in times.items()
        for in_flight, us in all_us.items()
    ]
    program = tmp_path / "program"
    lines = "\n".join(map(json.dumps, points))
    program.write_text(f"#!/bin/sh\n[ \"$2 $3\" = 'cuda --tune' ] && cat <<'END'\n{lines}\nEND\n")
    program.chmod(0o755)
    table = tmp_path / "cpp" / "src" / "cuda" / "fetch_tuning.inc"
    table.parent.mkdir(parents=True)

    command = [sys.executable, ROOT / "scripts" / "run_bench.py", program, "--tune"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)

    heading, machine, how, *entries = table.read_text().splitlines()
    assert heading.startswith("// Rows of FetchTuning")
    assert re.match(r"// .+, \d{4}-\d\d-\d\d, commit ", machine)
    assert how == "// Made by: scripts/bench --tune"
    # Halfway is the geometric mean: 1,152 B of 576 and 2,304 B. The two that agree are one entry.
    assert entries == ["{1152, 208},", "{2147483647, 512},"]
    assert "30.0%" in run.stdout  # what 320 loses where 208 is best
