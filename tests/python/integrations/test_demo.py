"""The demo client ends as it promises, and notices a wrong token."""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import importlib.util
import pathlib

import pytest

from sparse_kvcm.integrations.transformers.steps import DecodeSteps

PATH = pathlib.Path(__file__).parents[3] / "python" / "examples" / "glm5.py"


@pytest.fixture
def demo(monkeypatch):
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("glm5", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The prompts must stay longer than a lease and differ.
    monkeypatch.setattr(module, "PROMPT_LENGTHS", (120, 90))
    return module


def last_line(capsys):
    return capsys.readouterr().out.rstrip().splitlines()[-1]


def test_demo_ends_with_identical_tokens(demo, device, capsys):
    assert demo.main(["--new-tokens", "12", "--device", device]) == 0
    assert last_line(capsys) == "tokens identical: 2 requests x 12 tokens"


def test_demo_names_the_first_wrong_token(demo, capsys, monkeypatch):
    gather = DecodeSteps.gather
    monkeypatch.setattr(
        DecodeSteps, "gather", lambda self, layer, slots: gather(self, layer, slots ^ 1)
    )
    assert demo.main(["--new-tokens", "12"]) == 1
    assert last_line(capsys).startswith("request ")


@pytest.mark.parametrize("number", ["0", "-3"])
def test_demo_refuses_to_decode_nothing(demo, capsys, number):
    with pytest.raises(SystemExit) as end:
        demo.main(["--new-tokens", number])
    assert end.value.code == 2
    assert f"error: --new-tokens must be >= 1, got {number}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu7", "error: --device must be cpu, cuda or cuda:<index>, got tpu7"),
        ("cuda:99", "error: --device cuda:99 is not there: "),
    ],
)
def test_demo_refuses_a_device_that_is_not_there(demo, capsys, device, message):
    with pytest.raises(SystemExit) as end:
        demo.main(["--device", device])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_refuses_histories_that_fit_their_leases(demo, capsys, monkeypatch):
    monkeypatch.setattr(demo, "PROMPT_LENGTHS", (30, 20))
    assert demo.main(["--new-tokens", "12"]) == 1
    assert "fits its" in last_line(capsys)
