"""Configuration models: defaults, text in and out, schemas, and what offload refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.byte_counts import parse_bytes, show_bytes
from sparse_kvcm.config import (
    DeepSeekSparseAttentionConfig,
    DeepSeekV4SparseAttentionConfig,
    KvCacheConfig,
    SparseKvCacheOffloadConfig,
    WorkerConfig,
    check_gates,
    json_schema,
)

SCHEMA = Path(__file__).with_name("schemas") / "worker_config.json"


def worker(**changes: Any) -> WorkerConfig:
    """An offloading worker that passes all gates, but for `changes`, merged into its parts."""
    fields: dict[str, Any] = {
        "sparse_attention_config": {"algorithm": "dsa", "enable_kv_cache_offload": True},
        "kv_cache_config": {},
        "cache_transceiver_config": {"backend": "nixl"},
        "generation_only": True,
    }
    return WorkerConfig.model_validate(fields | changes)


def test_offload_is_off_with_twice_the_selection_by_default() -> None:
    for model in (DeepSeekSparseAttentionConfig, DeepSeekV4SparseAttentionConfig):
        config = model()
        assert config.enable_kv_cache_offload is False
        assert config.kv_cache_offload_config == SparseKvCacheOffloadConfig(
            gpu_cache_factor=2.0, host_history_size=None
        )


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("choice", "result"), [(None, True), (True, True), (False, False)])
def test_offload_leaves_the_logits_kernel_alone(
    offload: bool, choice: bool | None, result: bool
) -> None:
    fields: dict[str, Any] = {"enable_kv_cache_offload": offload}
    if choice is not None:
        fields["use_cute_dsl_paged_mqa_logits"] = choice
    config = DeepSeekSparseAttentionConfig(**fields)
    assert config.use_cute_dsl_paged_mqa_logits is result
    assert ("use_cute_dsl_paged_mqa_logits" in config.model_dump(exclude_unset=True)) is (
        choice is not None
    )


def test_text_comes_back_as_it_was() -> None:
    text = """
sparse_attention_config:
  algorithm: deepseek_v4
  enable_kv_cache_offload: true
  kv_cache_offload_config: {gpu_cache_factor: auto, host_history_size: 1.5GiB}
kv_cache_config: {max_batch_size: 7, dtype: fp8_ds_mla}
"""
    config = WorkerConfig.from_text(text)
    offload = config.sparse_attention_config.kv_cache_offload_config
    assert isinstance(config.sparse_attention_config, DeepSeekV4SparseAttentionConfig)
    assert offload.host_history_size == 3 << 29
    assert WorkerConfig.from_text(config.to_yaml()) == config
    assert WorkerConfig.from_text(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "attention", [DeepSeekSparseAttentionConfig(), DeepSeekV4SparseAttentionConfig()]
)
def test_a_configuration_made_in_python_comes_back_too(attention: Any) -> None:
    config = WorkerConfig(sparse_attention_config=attention)
    assert WorkerConfig.from_text(config.to_yaml()) == config
    assert type(WorkerConfig.from_text(config.to_yaml()).sparse_attention_config) is type(attention)


def test_text_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="text must be YAML or JSON: mapping values"):
        WorkerConfig.from_text("a: b: c")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text(worker().to_yaml())
    assert WorkerConfig.from_file(path) == worker()


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (SparseKvCacheOffloadConfig, {"gpu_cache_factor": 0.99}, "gpu_cache_factor"),
        (SparseKvCacheOffloadConfig, {"gpu_cache_factor": float("inf")}, "gpu_cache_factor"),
        (SparseKvCacheOffloadConfig, {"gpu_cache_factor": "most"}, "gpu_cache_factor"),
        (SparseKvCacheOffloadConfig, {"host_history_size": 0}, "host_history_size"),
        (SparseKvCacheOffloadConfig, {"host_history_size": "a lot"}, "host_history_size"),
        (DeepSeekSparseAttentionConfig, {"gpu_cache_factor": 2}, "gpu_cache_factor"),
        (
            KvCacheConfig,
            {"avg_seq_len": 9, "max_seq_len": 8},
            "avg_seq_len must be <= max_seq_len 8",
        ),
        (KvCacheConfig, {"max_batch_size": 0}, "max_batch_size"),
        (KvCacheConfig, {"max_batch_size": True}, "max_batch_size"),
        (KvCacheConfig, {"max_seq_len": "12"}, "max_seq_len"),
        (KvCacheConfig, {"max_util_for_resume": float("nan")}, "max_util_for_resume"),
        (KvCacheConfig, {"max_gpu_total_bytes": (1 << 60) + 1}, "max_gpu_total_bytes"),
        (KvCacheConfig, {"dtype": "int8"}, "dtype"),
        (WorkerConfig, {"sparse_attention_config": {"algorithm": "other"}}, "algorithm"),
    ],
)
def test_a_bad_value_is_refused_by_field(
    model: type[pydantic.BaseModel], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        model.model_validate(fields)


@pytest.mark.parametrize(
    "text",
    [
        "max_gpu_total_bytes: '" + "9" * 5000 + "'",
        "max_gpu_total_bytes: '" + "9" * 400 + ".0'",
        "max_gpu_total_bytes: " + "9" * 5000,
        "[" * 20_000,
        "{" * 20_000,
    ],
    ids=["digits", "fraction", "number", "lists", "maps"],
)
def test_text_that_is_too_much_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"max_gpu_total_bytes|\[from_text\] text must be YAML"):
        KvCacheConfig.from_text(text)


def test_schema_equals_the_reviewed_one() -> None:
    # If the change is meant: sparse-kvcm schema > tests/python/schemas/worker_config.json
    assert json_schema() == json.loads(SCHEMA.read_text())


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"generation_only": False}, "generation_only must be true", "false"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1", "2"),
        ({"context_parallel": {"size": 2}}, "context_parallel.size must be 1", "2"),
        ({"context_parallel": {"size": 2, "kind": "star"}}, "nor STAR", "2"),
        ({"max_draft_len": 3}, "max_draft_len must be 0", "3"),
        ({"max_beam_width": 4}, "max_beam_width must be 1", "4"),
        ({"enable_chunked_context": True}, "enable_chunked_context must be false", "true"),
        (
            {"kv_cache_config": {"use_kv_cache_manager_v2": False}},
            "use_kv_cache_manager_v2 must be true or auto",
            "false",
        ),
        ({"kv_cache_config": {"enable_block_reuse": True}}, "enable_block_reuse", "true"),
        ({"kv_cache_config": {"enable_kv_pool_rebalance": True}}, "pool_rebalance", "true"),
        ({"kv_cache_config": {"managed_by_another": True}}, "managed_by_another", "true"),
    ],
)
def test_offload_refuses_what_it_cannot_do(changes: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(kvcm.InvalidArgument) as error:
        check_gates(worker(**changes))
    assert field in str(error.value)
    assert f"got {value}:" in str(error.value)
    resident = {"sparse_attention_config": {"algorithm": "dsa"}}
    check_gates(worker(**(changes | resident)))  # without offload all of it may be


def test_offload_without_a_transceiver_names_disaggregated_generation() -> None:
    with pytest.raises(NotImplementedError, match="disaggregated generation"):
        check_gates(worker(cache_transceiver_config=None))


def test_an_import_in_the_process_counts_as_a_transceiver() -> None:
    check_gates(worker(cache_transceiver_config={"backend": "in_process"}))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), None])
def test_gpus_from_sm80_on_pass(capability: tuple[int, int] | None) -> None:
    check_gates(worker(), capability)


def test_an_older_gpu_is_refused_before_anything_else() -> None:
    with pytest.raises(NotImplementedError, match=r"compute capability must be >= 8.0 .*, got 7.5"):
        check_gates(worker(cache_transceiver_config=None, max_draft_len=1), (7, 5))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("45.6GB", 45_600_000_000), ("64 GiB", 64 << 30), ("1kB", 1000), (7, 7)],
)
def test_bytes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1 XB", "GB", "1.2.3GB", "nan"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match="budget must be a number of bytes"):
        parse_bytes(text, "budget")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (45_600_000_000, "45.60 GB")]
)
def test_bytes_are_shown(size: int, text: str) -> None:
    assert show_bytes(size) == text
