"""`scripts/demo disaggregated`: equal tokens over both transports, and what it says of a fault."""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import importlib
import pathlib

import pytest
import torch

pytest.importorskip("msgspec")

from sparse_kvcm._core import InvalidArgument

from sparse_kvcm.transfer.staging import StagingRing

EXAMPLES = pathlib.Path(__file__).parents[3] / "python" / "examples"


@pytest.fixture
def demo(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("disaggregated")
    monkeypatch.setattr(module.MODELS["glm5"], "lengths", (150, 120, 90))
    monkeypatch.setattr(module.MODELS["v4"], "lengths", (450, 131))
    return module


def last_line(capsys):
    return capsys.readouterr().out.rstrip().splitlines()[-1]


@pytest.mark.parametrize(("model", "requests"), [("glm5", 3), ("v4", 2)])
def test_tokens_are_those_of_one_stock_process(demo, device, capsys, model, requests):
    options = ["--model", model, "--transport", "in_process", "--device", device]
    assert demo.main([*options, "--new-tokens", "9"]) == 0
    assert last_line(capsys) == f"tokens identical: {requests} requests x 9 tokens"


@pytest.fixture
def over_nixl(demo, monkeypatch):
    nixl = importlib.import_module("sparse_kvcm.transfer.nixl")
    try:
        nixl.load()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return ["--model", "glm5", "--transport", "nixl", "--new-tokens", "6"]


def test_two_processes_over_nixl_decode_the_same_tokens(demo, over_nixl, capsys):
    assert demo.main(over_nixl) == 0
    assert last_line(capsys) == "tokens identical: 3 requests x 6 tokens"


def test_two_decode_ranks_serve_different_requests_of_one_prefill(demo, over_nixl, device, capsys):
    if device != "cpu" and (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"NCCL needs 2 GPUs, there are {count}")
    assert demo.main([*over_nixl, "--decode-ranks", "2", "--device", device]) == 0
    output = capsys.readouterr().out
    assert ("agreed over gloo" if device == "cpu" else "agreed over nccl") in output
    assert output.rstrip().splitlines()[-1] == "tokens identical: 3 requests x 6 tokens"


def test_a_decode_rank_that_dies_is_reported(demo, over_nixl, capsys, monkeypatch):
    run = demo.DecodeRanks.run

    def kill_then_run(self, progress):
        for process in self._processes:
            process.kill()
            process.join()
        return run(self, progress)

    monkeypatch.setattr(demo.DecodeRanks, "run", kill_then_run)
    monkeypatch.setattr(demo.MODELS["glm5"], "stock", lambda *args: [])
    assert demo.main([*over_nixl, "--decode-ranks", "2"]) == 1
    assert last_line(capsys) == "GLM-5: decode rank 1 has ended; it said why above"


def test_without_nixl_decode_ranks_are_skipped_visibly(demo, capsys):
    assert demo.main(["--transport", "in_process", "--decode-ranks", "2"]) == 0
    assert last_line(capsys).startswith("skipped: decode ranks are processes")


def test_a_prefill_process_that_is_killed_fails_what_it_had_not_sent(
    demo, over_nixl, capsys, monkeypatch
):
    tokens = demo.Process.tokens

    def kill_then_look(self):
        self._process.kill()
        self._process.join()
        return tokens(self)

    monkeypatch.setattr(demo.Process, "tokens", kill_then_look)
    monkeypatch.setattr(demo.MODELS["glm5"], "stock", lambda *args: [])
    assert demo.main(over_nixl) == 1
    assert last_line(capsys) == ("GLM-5: request 2: peer prefill is gone: its process has ended")


def test_a_wrong_byte_is_found_by_its_token(demo, capsys, monkeypatch):
    offsets = StagingRing.offsets
    monkeypatch.setattr(StagingRing, "offsets", lambda *args: offsets(*args)[::-1])
    options = ["--model", "glm5", "--transport", "in_process"]
    assert demo.main([*options, "--new-tokens", "9"]) == 1
    assert "differs at token" in last_line(capsys)


def test_a_prefill_that_dies_is_reported_by_request(demo, capsys, monkeypatch):
    def die(self):
        raise EOFError

    monkeypatch.setattr(demo.Inline, "tokens", die)
    monkeypatch.setattr(demo.MODELS["v4"], "stock", lambda *args: [])
    options = ["--model", "v4", "--transport", "in_process"]
    assert demo.main([*options, "--new-tokens", "9"]) == 1
    assert "peer prefill is gone: its process has ended" in last_line(capsys)


@pytest.mark.parametrize("model", ["glm5", "v4"])
def test_adopting_what_the_manager_does_not_have_is_refused(demo, model):
    made = demo.MODELS[model]()
    stock = made.build("cpu")
    driver = made.make_driver(stock, made.make_manager(stock, 200, resident=False))
    with driver, pytest.raises(InvalidArgument, match="must be one with tokens in the manager"):
        driver.adopt(5, 0, 3)
