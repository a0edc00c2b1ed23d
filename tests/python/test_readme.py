"""What the README shows of planning and of starting a worker is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from sizing_cases import GIB, available
from sparse_kvcm.cli import app
from sparse_kvcm.config import WorkerConfig, check_gates
from sparse_kvcm.models import load_geometry
from sparse_kvcm.sizing import Machine, size_worker

README = (Path(__file__).parents[2] / "README.md").read_text()


def found(pattern: str) -> str:
    match = re.search(pattern, README, re.DOTALL)
    assert match is not None, pattern
    return match[1]


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_a_worker_of_the_yaml_prints_the_line() -> None:
    config = WorkerConfig.from_text(found(r"```yaml\n(sparse_attention_config.*?)```"))
    check_gates(config, (9, 0))
    geometry = load_geometry(found(r'load_geometry\("([^"]*)"\), machine'))
    machine = Machine(int(found(r"device_budget=([\d_]+)")), host=available(1024 * GIB))
    printed = found(r"print\(worker.sizing.capacity\)  # (.*?) \.\.\.")
    assert str(size_worker(config, geometry, machine).capacity).startswith(printed)


def test_the_plan_prints_the_table() -> None:
    shown = found(r"\$ sparse-kvcm (plan .*?)```")
    command, _, table = shown.partition("\n")
    assert words(CliRunner().invoke(app, command.split()).output) == words(table)
