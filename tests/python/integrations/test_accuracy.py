"""The accuracy benchmark on tiny checkpoints: equal runs pass, worthless ones and others fail."""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import importlib
import json
import pathlib

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import sparse_kvcm as kvcm

ROOT = pathlib.Path(__file__).parents[3]
SHORT = ["--requests", "2", "--new-tokens", "8"]
KINDS = pytest.mark.parametrize(
    ("model", "kv_dtype"), [("glm5", "fp8"), ("glm5", "nvfp4"), ("v4", "nvfp4")]
)


@pytest.fixture
def accuracy(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.accuracy.cli")


def last_line(capsys):
    return capsys.readouterr().out.rstrip().splitlines()[-1]


@KINDS
def test_offloaded_run_writes_what_the_resident_one_writes(
    accuracy, device, capsys, tmp_path, model, kv_dtype
):
    file = tmp_path / "folder" / "figures.json"
    options = ["--tiny", model, "--kv-dtype", kv_dtype, "--new-tokens", "12", "--json", str(file)]
    assert accuracy.main([*options, "--batch-size", "2", "--device", device]) == 0
    assert last_line(capsys) == "tokens identical: 48 of 48"
    figures = json.loads(file.read_text())
    assert (figures["faults"], figures["agreement"], figures["kv_dtype"]) == ([], 1.0, kv_dtype)
    assert figures["rouge_l"]["offloaded_against_resident"] == 1.0
    assert figures["rouge_l"]["offloaded"] == figures["rouge_l"]["resident"]
    resident, offloaded = figures["resident"], figures["offloaded"]
    assert resident["tokens"] == offloaded["tokens"]
    assert len({tuple(tokens) for tokens in offloaded["tokens"]}) == 4  # the prompts tell
    assert (offloaded["steps"], offloaded["rows"], offloaded["fewest_rows"]) == (22, 44, 2)
    assert offloaded["shortest_history"] > offloaded["lease"] > 0
    assert offloaded["misses"] > 0
    assert (resident["lease"], resident["misses"]) == (None, 0)


@pytest.mark.parametrize(("model", "form"), [("glm5", "compact"), ("v4", "scatter")])
def test_kinds_of_records_give_different_answers(accuracy, tmp_path, model, form):
    """Records are really held: were they not, all kinds would decode the same."""
    answers = []
    for kv_dtype in ("bf16", "nvfp4"):
        file = tmp_path / "figures.json"
        options = ["--tiny", model, "--kv-dtype", kv_dtype, "--form", form, "--json", str(file)]
        assert accuracy.main([*options, "--requests", "2"]) == 0
        answers.append(json.loads(file.read_text())["resident"]["tokens"])
    assert answers[0] != answers[1]


@pytest.mark.parametrize("options", [["--requests", "1"], ["--requests", "3", "--batch-size", "2"]])
@pytest.mark.parametrize("model", ["glm5", "v4"])
def test_decode_of_one_request_alone_fails(accuracy, capsys, tmp_path, model, options):
    file = tmp_path / "figures.json"
    assert accuracy.main(["--tiny", model, *options, "--json", str(file)]) == 1
    message = "decode was not batched: step 1 had 1 of at least 2 requests"
    assert last_line(capsys).startswith(f"FAILED: {message}")
    (fault,) = json.loads(file.read_text())["faults"]
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("glm5", "has 200 units and fits its lease of 320"),
        ("v4", "has 84 units and fits its lease of 160"),
    ],
)
def test_a_history_that_fits_its_lease_fails(accuracy, capsys, model, message):
    assert accuracy.main(["--tiny", model, "--gpu-cache-factor", "8", *SHORT]) == 1
    line = last_line(capsys)
    assert line.startswith("FAILED: offload was not in use: the history of request 0 ")
    assert message in line


@KINDS
def test_a_fetch_that_is_skipped_is_noticed(
    accuracy, capsys, monkeypatch, tmp_path, model, kv_dtype
):
    monkeypatch.setattr(kvcm.Batch, "fetch", lambda *args, **options: None)
    file = tmp_path / "figures.json"
    options = ["--tiny", model, "--kv-dtype", kv_dtype, *SHORT, "--json", str(file)]
    assert accuracy.main(options) == 1
    assert last_line(capsys).startswith("FAILED: tokens differ: ")
    figures = json.loads(file.read_text())
    assert figures["agreement"] < 0.9
    assert figures["rouge_l"]["offloaded_against_resident"] < 1.0
    assert figures["offloaded"]["misses"] > 0
    # Who allows it is told the figures.
    assert accuracy.main([*options, "--min-agreement", "0"]) == 0


# --- a checkpoint and a file ---


def write_tokenizer(folder, end=None):
    """A word is a token; unknown ones are token 1."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", *(f"w{i}" for i in range(2, 1024))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words, 1)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)


def write_records(path, lengths):
    lines = [
        {"document": " ".join(f"w{2 + (7 * i + n) % 1000}" for i in range(n)), "summary": "w5 w6"}
        for n in lengths
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_records_of_a_file_are_summarised_by_a_checkpoint(accuracy, tmp_path):
    models = importlib.import_module("benchmarks.accuracy.models")
    models.write_tiny("glm5", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    write_records(tmp_path / "records.jsonl", [230, 700, 200])
    file = tmp_path / "figures.json"
    options = [
        "--checkpoint",
        str(tmp_path / "model"),
        "--dataset",
        str(tmp_path / "records.jsonl"),
    ]
    options += ["--kv-dtype", "fp8", "--document-tokens", "300", "--requests", "3"]
    assert accuracy.main([*options, "--new-tokens", "6", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert [len(tokens) for tokens in figures["offloaded"]["tokens"]] == [6, 6, 6]
    assert 200 < figures["offloaded"]["shortest_history"] < 230  # the shortest comes first


@pytest.mark.parametrize("model", ["glm5", "v4"])
def test_answers_end_where_the_checkpoint_says(accuracy, monkeypatch, tmp_path, model):
    models = importlib.import_module("benchmarks.accuracy.models")
    load = models.load
    # As loaded, a DeepSeek-V4 of BF16 does not run under transformers 5.18: see load_tiny.
    monkeypatch.setattr(models, "load", lambda *args: load(*args).to(torch.bfloat16))
    models.write_tiny(model, tmp_path)
    write_tokenizer(tmp_path)
    write_records(tmp_path / "records.jsonl", [400, 410])
    file = tmp_path / "figures.json"
    options = ["--checkpoint", str(tmp_path), "--dataset", str(tmp_path / "records.jsonl")]
    options += ["--requests", "2", "--new-tokens", "12", "--json", str(file)]

    def answers():
        assert accuracy.main(options) == 0
        offloaded = json.loads(file.read_text())["offloaded"]
        return offloaded["tokens"], offloaded["steps"]

    (first, second), steps = answers()
    assert steps == 11
    ends = [first[2], second[6]]
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))

    def until_end(tokens):
        return tokens[: 1 + min(tokens.index(end) for end in ends if end in tokens)]

    expected = [until_end(first), until_end(second)]
    assert answers() == (expected, max(map(len, expected)) - 1)


def test_documents_are_cut_and_asked_about(accuracy, tmp_path):
    dataset = importlib.import_module("benchmarks.accuracy.dataset")
    write_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    records = [{"document": "w2 w3 w4 w5", "summary": "w9"}]
    (plain,) = dataset.summaries(records, tokenizer, 3)
    text = tokenizer.decode(plain.prompt)
    assert "w2 w3 w4" in text
    assert "w5" not in text
    assert plain.reference == "w9"
    tokenizer.chat_template = (
        "w100 {{ messages[0].content }} {% if add_generation_prompt %}w101{% endif %}"
    )
    (chat,) = dataset.summaries(records, tokenizer, 3)
    assert tokenizer.decode(chat.prompt) == f"w100 {text} w101"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"document": "a", "summary": "b"}\n\n', "must have 2 records, one a request, got 1"),
        ('{"document": "a", "summary": "b"}\n{"document": "a"}\n', "line 2 must have texts"),
        ('{"document": "a", "summary": ""}\n', "line 1 must have texts document and summary"),
        ("[1]\n", "line 1 must have texts"),
        ("not\n", "line 1 must be a JSON object"),
    ],
)
def test_a_file_with_other_lines_is_refused_by_line(accuracy, tmp_path, text, message):
    dataset = importlib.import_module("benchmarks.accuracy.dataset")
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        dataset.read_records(path, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --checkpoint --tiny is required"),
        (["--checkpoint", "x"], "--checkpoint and --dataset go together"),
        (["--tiny", "v4", "--dataset", "x"], "--checkpoint and --dataset go together"),
        (["--tiny", "v4", "--requests", "0"], "--requests must be >= 1, got 0"),
        (["--tiny", "v4", "--new-tokens", "1"], "--new-tokens must be >= 2, got 1"),
        (["--tiny", "v4", "--kv-scale", "0"], "--kv-scale must be > 0, got 0.0"),
        (["--tiny", "v4", "--min-agreement", "2"], "--min-agreement must be in [0, 1], got 2.0"),
        (["--tiny", "v4", "--device", "cuda:99"], "--device cuda:99 is not there"),
        (["--tiny", "v4", "--device", "tpu7"], "--device must be cpu, cuda or cuda:<index>"),
        (["--tiny", "v4", "--json", "/dev/null/x"], "--json must be a writable file"),
        (["--tiny", "v4", "--kv-dtype", "nvfp4_ds_mla"], "kv_dtype of a DeepSeek-V4 model must be"),
        (["--tiny", "v4", "--new-tokens", "9999"], "max_seq_len must be in [1, 2048]"),
        (["--checkpoint", "nowhere", "--dataset", "nowhere"], "No such file"),
    ],
)
def test_a_wrong_argument_is_refused(accuracy, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        accuracy.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
