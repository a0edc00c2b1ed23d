"""What the decode-slice commands refuse, before anything is measured or written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.decode_slice import __main__ as command
from benchmarks.decode_slice import fetch_probe, fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "glm,more"], "--sweep must be all or of glm, long"),
        (["--modes", "both"], "--modes must be of resident, offloaded, got 'both'"),
        (["--overlap", "none,more"], "--overlap must be of none, side"),
        (["--plot", "x"], "--plot needs --json"),
        (["--turns", "0"], "--turns must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--warm-up", "0"], "--warm-up (at least 2)"),
        (["--prompt", "0"], "tokens of a prompt must be at least 1, got 0"),
        (["--batches", "1,0"], "integers from 1 on, got '0'"),
        (["--batches", "1,,max"], "integers from 1 on, got ''"),
        (["--factor", "nan"], "--factor must be in [1, 31.9375] for glm-5.2, got nan"),
        (["--factor", "0.5"], "got 0.5"),
        (["--ranks", "3"], "--ranks must be a divisor of 256, the experts, up to 32, got 3"),
        (["--ranks", "0"], "got 0"),
        (["--trace", "x"], "--trace must be of glm51"),
        (["--device", "x"], "--device must be cpu, cuda"),
        (["--layers", "0"], "whole selection groups"),
        (["--model", "tiny", "--layers", "2"], "layers of tiny are fixed, got 2"),
        (["--model", "x"], "model must be one of"),
        (["--sweep", ""], "--sweep must be all or of"),
        (["--only-plot"], "--only-plot needs --json"),
        (["--only-plot", "--json", "not-there.json"], "records must be in a file"),
        (["--json", "."], "records must be in a file"),
        (["--json", f"{__file__}/x"], "--json must be a path that can be written"),
        (["--json", "not-there.json", "--plot", __file__], "--plot must be a folder"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", '{"runs": 3}', '{"runs": [{"model": "x"}]}']
)
def test_a_file_of_no_records_is_refused_before_anything_is_measured(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "runs.json").write_text(text)
    for arguments in (["--json", str(path)], ["--only-plot", "--json", str(path)]):
        with pytest.raises(SystemExit):
            command.parse(arguments)
        assert str(path) in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["fit", str(path)])
    with pytest.raises(SystemExit):
        fit.main()
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--prompt", "0"], ["--factor", "inf"], ["--device", "x"]]
)
def test_a_wrong_option_of_the_probe_is_refused_by_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fetch_probe.main(arguments)
    assert f"{arguments[0]} must be" in capsys.readouterr().err


def test_only_plot_measures_nothing_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "runs.json").write_text('{"runs": []}')
    monkeypatch.setattr(command.Session, "run", lambda *_: pytest.fail("measures"))
    command.main(["--sweep", "tiny", "--only-plot", "--json", str(path)])
