"""The command sparse-kvcm: output, refusals, and what it must not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sizing_cases import GIB, FakeSystem
from sparse_kvcm.cli import app, main
from sparse_kvcm.cli.doctor import examine
from sparse_kvcm.config import json_schema
from sparse_kvcm.planner.plan import ADVICE

doctor = sys.modules["sparse_kvcm.cli.doctor"]
GLM = ["plan", "--model", "glm-5.2", "--kv-dtype", "fp8", "--device-budget", "45.6GB"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def plan_json(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run(*GLM, "--json", *arguments))
    return result


def test_plan_writes_the_documented_keys() -> None:
    result = plan_json("--prompt", "32768", "--output", "160", "--gpu-cache-factor", "2")
    assert 28 <= result["resident"]["max_batch"] <= 30
    assert 150 <= result["offload"]["max_batch"] <= 165
    assert result["offload"]["row_bytes"] == pytest.approx(177.5 * (1 << 20), rel=0.01)
    assert result["offload"]["binding_limit"] == "arena"
    assert result["seq_len"] == 32_928


def test_v4_flash_is_admitted_as_published_by_default() -> None:
    model = ["plan", "--model", "deepseek-v4-flash", "--gpu-cache-factor", "4"]
    result = json.loads(run(*model, "--device-budget", "150.85GB", "--json"))
    assert result["resident"]["max_batch"] == 633
    assert result["offload"]["max_batch"] >= 1500


def test_the_table_has_the_figures_of_the_json() -> None:
    result, table = plan_json(), run(*GLM)
    assert f"{result['offload']['max_batch']}" in table
    assert f"{result['resident']['max_batch']}" in table
    for word in ("binding limit", "arena", "a lease of 178.6 MiB", "misses", "gpu_cache_factor"):
        assert word in table


def test_the_table_says_so_where_no_request_fits() -> None:
    nobody = ["plan", "--model", "glm-5.2", "--device-budget", "1MB"]
    table = run(*nobody, status=1)
    assert "No offloaded request fits" in table
    assert "is best" not in table
    assert json.loads(run(*nobody, "--json", status=1))["offload"]["max_batch"] == 0


def test_advice_names_options_of_the_command() -> None:
    table = run(*GLM, "--host-memory", "0", status=1)
    advice = table[table.index("To fit one:") :]
    assert "raise --host-memory" in advice
    for advice in ADVICE.values():
        assert not re.findall(r"(?<!-)\b\w+_\w+", advice)
        for option in re.findall(r"--[\w-]+", advice):
            assert option in run("plan", "--help")


def test_help_names_the_status_of_a_plan_that_holds_nobody() -> None:
    assert "1 if none does" in re.sub(r"\s+", " ", run("plan", "--help"))


def test_auto_plans_with_the_recommended_factor() -> None:
    result = plan_json("--gpu-cache-factor", "auto")
    assert result["offload"]["gpu_cache_factor"] == result["recommended_gpu_cache_factor"]


def test_gpu_memory_less_weights_is_the_budget() -> None:
    result = json.loads(
        run(
            *GLM[:5],
            "--json",
            "--gpu-memory",
            "100GB",
            "--weights",
            "40GB",
            "--gpu-fraction",
            "0.5",
        )
    )
    assert result["budgets"]["device_bytes"] == 30_000_000_000


def test_weights_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", "glm-5.2", "--gpu-memory", "80GB", "--weights", "90GB"]
    monkeypatch.setattr(sys, "argv", ["sparse-kvcm", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert "--gpu-memory less --weights must be in" in capsys.readouterr().err


def test_a_length_past_the_model_s_is_warned_of_in_both_forms() -> None:
    assert "Warning: glm-5.2 takes sequences of 1048576" in run(*GLM, "--prompt", "2000000")
    assert len(plan_json("--prompt", "2000000")["warnings"]) == 1
    assert plan_json()["warnings"] == []


def test_host_memory_is_divided_by_ranks() -> None:
    result = plan_json("--host-memory", "100GB", "--local-ranks", "4")
    assert result["budgets"]["host_bytes"] == 25_000_000_000
    assert result["offload"]["binding_limit"] == "host history"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    run(*GLM, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["sparse-kvcm", *GLM, "--plot", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "sparse_kvcm[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "none"], "model must be one of"),
        (["--kv-dtype", "int8"], "--kv-dtype must be one of bf16, .*, got 'int8'"),
        (["--index-dtype", "int8"], "index_dtype must be one of .*, got 'int8'"),
        (["--gpu-cache-factor", "much"], "--gpu-cache-factor must be a number or auto, got 'much'"),
        (["--gpu-cache-factor", "0.5"], "gpu_cache_factor must be in"),
        (["--device-budget", "lots"], "--device-budget must be a number of bytes"),
        (["--gpu-memory", "1GB"], "one of --device-budget and --gpu-memory"),
        (["--local-ranks", "0"], "--local-ranks must be >= 1, got 0"),
        (["--prompt", "0"], "--prompt must be >= 1"),
        (["--link", "0"], "link_gb_s must be > 0"),
        (["--step-ms", "inf"], "step_ms must be > 0 and finite, got inf"),
        (["--weights", "1GB"], "--weights and --gpu-fraction go with --gpu-memory"),
        (["--gpu-fraction", "0.5"], "--weights and --gpu-fraction go with --gpu-memory"),
        (["--device-budget", "0"], r"--device-budget must be in \[1, 2\^60\] B, got 0"),
        (["--device-budget", "9999999TB"], "--device-budget must be in"),
        (["--max-util", "nan"], "max_util_for_resume must be in .*, got nan"),
        (["--plot", "/no/such/folder/a.png"], "--plot must be a file that can be written"),
        (["--plot", "a.bogus"], "--plot must be a file that can be written"),
        (["--plot", "a"], "path must end in .png"),
        (["--locality", "none"], "locality must be one of"),
        (["--max-batch-size", "0"], r"max_batch_size must be .* \[1, 1048576\], got 0"),
        (["--model", "x" * 5000], "model must be one of"),
        (["--device-budget", "9" * 5000], "--device-budget must be a number of bytes"),
        (["--device-budget", "9" * 400 + ".0"], "--device-budget must be a number of bytes"),
        (["--host-memory", "9999999TB"], "--host-memory must be <="),
        (["--tokens-per-block", "0.5"], None),
    ],
)
def test_a_bad_argument_is_one_line_on_stderr_and_status_2(
    arguments: list[str],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sparse-kvcm", *GLM, *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    if message is not None:
        assert output.err.count("\n") == 1
        assert re.search(message, output.err), output.err


def test_schema_is_printed() -> None:
    assert json.loads(run("schema")) == json_schema()


def test_a_plan_imports_nothing_that_is_slow() -> None:
    code = f"""
import sys
sys.argv = {["sparse-kvcm", *GLM]!r}
from sparse_kvcm.cli import main
try:
    main()
finally:
    print(sorted({{"torch", "matplotlib", "transformers", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("[]\n")


def findings(system: FakeSystem, ranks: int = 1) -> dict[str, tuple[str, str]]:
    return {f.name: (f.found, f.fix) for f in examine(ranks, str(system.root))}


def test_doctor_says_what_a_rank_would_pin_and_why(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.available(100 * GIB)
    system.group("/pod/job", limit=40 * GIB, used=0)
    found = findings(system, ranks=2)
    assert found["control group /pod/job"][0] == "42.95 GB"
    pinned = found["would be pinned by a rank"][0]
    assert pinned == "10.74 GB by itself, 21.47 GB at most (control group /pod/job, 2 ranks)"


def test_doctor_says_how_to_raise_memlock(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.available(100 * GIB)
    system.memlock(64 << 10)
    assert "ulimit -l" in findings(system)["would be pinned by a rank"][1]


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("this build has no CUDA backend: SPARSE_KVCM_CUDA was OFF", "with nvcc in the path"),
        ("... : CUDA driver version is insufficient for CUDA runtime version", "NVIDIA driver"),
        ("... finds no GPU: no CUDA-capable device is detected", "--gpus all"),
        ("the CUDA driver reports no GPU", "nvidia-smi"),
    ],
)
def test_doctor_s_fix_is_that_of_the_reason(
    reason: str, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "cuda_unavailable_reason", lambda: reason)
    assert fix in findings(FakeSystem(tmp_path))["driver"][1]


@pytest.mark.parametrize(
    ("nodes", "error", "found"),
    [
        (1, "Operation not permitted", "1"),
        (2, "", "2"),
        (2, "Operation not permitted", "2, memory cannot be placed: Operation not permitted"),
    ],
)
def test_doctor_asks_for_sys_nice_only_where_memory_cannot_be_placed(
    nodes: int, error: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = FakeSystem(tmp_path)
    for node in range(nodes):
        system.write(f"/sys/devices/system/node/node{node}/cpulist", "0\n")
    monkeypatch.setattr(doctor, "memory_placement_error", lambda: error)
    line, fix = findings(system)["NUMA nodes"]
    assert line == found
    assert ("SYS_NICE" in fix) is (nodes > 1 and error != "")


@pytest.mark.parametrize(
    ("text", "found", "fixed"),
    [
        ("always [madvise] never", "madvise", False),
        ("always madvise [never]", "never", True),
        ("", "not known", False),
    ],
)
def test_doctor_looks_at_huge_pages(tmp_path: Path, text: str, found: str, fixed: bool) -> None:
    system = FakeSystem(tmp_path)
    system.write("/sys/kernel/mm/transparent_hugepage/enabled", text)
    line, fix = findings(system)["huge pages"]
    assert line.startswith(found)
    assert bool(fix) is fixed


def test_doctor_finds_a_link_with_too_few_lanes(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    gpu = "/sys/bus/pci/devices/0000:01:00.0"
    for name, text in {
        "vendor": "0x10de",
        "class": "0x030200",
        "current_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "8",
        "max_link_width": "16",
    }.items():
        system.write(f"{gpu}/{name}", text + "\n")
    found, fix = findings(system)["link 0000:01:00.0"]
    assert found == "32.0 GT/s PCIe x8"
    assert "8 lanes of 16" in fix


def test_doctor_runs_here() -> None:
    assert "MemAvailable" in run("doctor")
    assert {"name", "found", "fix"} == set(json.loads(run("doctor", "--json"))[0])
