"""The demo client ends as it promises, and notices a wrong token."""

from __future__ import annotations

from tiny_glm import torch

# isort: split
import importlib
import os
import pathlib

import pytest

from sparse_kvcm.integrations.transformers.dsa_steps import DsaSteps

EXAMPLES = pathlib.Path(__file__).parents[3] / "python" / "examples"


@pytest.fixture
def demo(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("glm5")
    # The prompts must stay longer than a lease and differ.
    monkeypatch.setattr(module, "PROMPT_LENGTHS", (120, 90))
    return module


def last_line(capsys, lines=1):
    """The end of what was printed; several lines are one that was folded."""
    return " ".join(capsys.readouterr().out.rstrip().splitlines()[-lines:])


@pytest.mark.parametrize("options", [[], ["--resident"]], ids=["offloaded", "resident"])
def test_demo_ends_with_identical_tokens(demo, device, capsys, options):
    assert demo.main(["--new-tokens", "12", "--device", device, *options]) == 0
    assert last_line(capsys) == "tokens identical: 2 requests x 12 tokens"


def test_demo_of_deepseek_ends_with_identical_tokens(demo, capsys):
    model = importlib.import_module("v32").v32
    assert demo.main(["--new-tokens", "12"], "DeepSeek-V3.2", model) == 0
    assert last_line(capsys) == "tokens identical: 2 requests x 12 tokens"


@pytest.mark.parametrize("options", [[], ["--resident"]], ids=["offloaded", "resident"])
def test_demo_of_deepseek_v4_ends_with_identical_tokens(demo, device, capsys, monkeypatch, options):
    module = importlib.import_module("v4")
    monkeypatch.setattr(module, "PROMPT_LENGTHS", (450, 130))
    assert module.main(["--new-tokens", "8", "--device", device, *options]) == 0
    assert last_line(capsys) == "tokens identical: 2 requests x 8 tokens"


@pytest.fixture
def triton_demo(demo, device, monkeypatch):
    """Two requests, BF16 records alone."""
    pytest.importorskip("triton")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton is compiled here")
    module = importlib.import_module("attention")
    monkeypatch.setattr(module, "PROMPT_LENGTHS", (290, 20))
    monkeypatch.setattr(module, "CALM", {"initializer_range": 0.05})
    for model in module.MODELS.values():
        monkeypatch.setattr(model, "kv_dtypes", ("bf16",))
        monkeypatch.setattr(model, "kinds", model.kinds[:3])
    return module


def test_demo_of_the_triton_attention_ends_with_identical_tokens(triton_demo, device, capsys):
    assert triton_demo.main(["--new-tokens", "2", "--device", device]) == 0
    assert last_line(capsys, 2).startswith("tokens identical: 2 runs x 2 requests x 2 tokens")


def test_demo_of_the_triton_attention_names_what_differs(triton_demo, device, capsys, monkeypatch):
    absorbed = importlib.import_module("sparse_kvcm.integrations.transformers.absorbed")
    decode, outputs = absorbed.sparse_mla_decode, []

    def wrong(*args, **options):
        outputs.append(decode(*args, **options)[0])
        return torch.zeros_like(outputs[-1]), None

    monkeypatch.setattr(absorbed, "sparse_mla_decode", wrong)
    assert triton_demo.main(["--new-tokens", "2", "--device", device, "--model", "glm5"]) == 1
    assert "off those of the stock model" in " ".join(capsys.readouterr().out.split()[-12:])


def test_demo_of_deepseek_v4_names_the_request_that_differs(demo, capsys, monkeypatch):
    module = importlib.import_module("v4")
    manager = importlib.import_module("sparse_kvcm.deepseek_v4.manager").DeepseekV4CacheManager
    monkeypatch.setattr(module, "PROMPT_LENGTHS", (450, 130))
    read = manager.read
    monkeypatch.setattr(manager, "read", lambda *args: read(*args) + 1)
    assert module.main(["--new-tokens", "12"]) == 1
    assert "tokens decoded others" in last_line(capsys)


def test_demo_names_the_first_wrong_token(demo, capsys, monkeypatch):
    gather = DsaSteps.gather
    monkeypatch.setattr(
        DsaSteps, "gather", lambda self, layer, slots: gather(self, layer, slots ^ 1)
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
    assert "fit their leases" in last_line(capsys)
