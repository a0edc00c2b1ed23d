"""From a DeepSeek-V4 and a worker's configuration to its manager, with the memory sized."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, available, machine, tiny_dsa, worker_config
from sparse_kvcm.base_manager import size_checked
from sparse_kvcm.config import WorkerConfig

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from sparse_kvcm import factory  # noqa: E402
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager  # noqa: E402
from sparse_kvcm.factory import create_deepseek_v4_manager, create_dsa_manager  # noqa: E402
from sparse_kvcm.models import load_geometry  # noqa: E402
from sparse_kvcm.sizing import OtherRankError, SingleRank  # noqa: E402
from sparse_kvcm.sizing.device import pool_tokens  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
MODEL = {  # that of v4_cases
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "sliding_window": cases.WINDOW,
    "index_topk": cases.TOP_K,
    "index_head_dim": 32,
    "max_position_embeddings": 4096,
}
WIDE = MODEL | {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def worker(
    offload: bool, batch: int = 3, longest: int = 900, changes: Any = None, **kv: Any
) -> WorkerConfig:
    kv = {"dtype": "bf16", "index_dtype": "bf16"} | kv
    fields = worker_config(batch, longest, algorithm="deepseek_v4", **kv).model_dump()
    fields["sparse_attention_config"]["enable_kv_cache_offload"] = offload
    return WorkerConfig.model_validate(fields | (changes or {}))


def decode(made: DeepseekV4CacheManager, steps: int = 7) -> None:
    """Requests of several lengths, each of whose steps reads what was written."""
    run = cases.Run.of(made)
    for request, prompt in ((1, 251), (2, 30)):
        run.add(request, prompt, most=300)
    run.step(steps)


def check_bytes(made: DeepseekV4CacheManager, config: WorkerConfig, where: Any) -> None:
    """Every part of what was planned is what was allocated."""
    _, sizing = size_checked(config, made.config.geometry, where, SingleRank())
    storage = made.store.storage
    assert storage.get_num_bytes(0) == sizing.device.pool_bytes
    assert made.config.max_batch_size == sizing.device.batch
    if sizing.host is None:
        cold = config.kv_cache_config.host_cache_size
        assert storage.layout.num_levels == (1 if cold is None else 2)
        assert cold is None or storage.get_num_bytes(1) == sizing.device.host_cache_bytes
        assert storage.config.cache_tiers[0].quota == sizing.device.pool_quota
        return
    manager, batch = made.store.manager, made.store.batch
    assert sizing.manager is not None
    assert manager.memory_use() == kvcm.planned_memory(sizing.manager)
    assert manager.memory_use().arena_bytes == sizing.device.fixed["arena"]
    assert manager.memory_use().metadata_bytes == sizing.device.fixed["entries"]
    assert batch.memory_use().device_bytes == sizing.device.fixed["batch buffers"]
    pools = [int(np.prod(manager.host_history(g).shape)) for g in range(manager.num_groups)]
    assert sum(pools) == sizing.host.history_bytes
    assert manager.memory_use().cold_bytes == sizing.host.cold


@MODES
@pytest.mark.parametrize("page", [None, 256])
def test_a_worker_gets_a_manager_that_decodes(offload: bool, page: int | None) -> None:
    config, where = worker(offload, tokens_per_block=page), machine()
    made = create_deepseek_v4_manager(MODEL, config, where)
    assert (made.config.offload is not None) is offload
    assert made.config.tokens_per_block == (page or 128)
    check_bytes(made, config, where)
    decode(made)


@MODES
@pytest.mark.parametrize(
    ("kv", "index"), [("bf16", "fp8"), ("fp8", "fp8"), ("fp8_ds_mla", "bf16"), ("nvfp4", "mxfp4")]
)
def test_planned_bytes_are_allocated_bytes(offload: bool, kv: str, index: str) -> None:
    for page, longest, usual in ((128, 900, None), (256, 2048, 700), (256, 1024, None)):
        config = worker(
            offload, 4, longest, dtype=kv, index_dtype=index, tokens_per_block=page,
            avg_seq_len=usual, max_util_for_resume=0.9,
            host_cache_size=5 * MIB,
        )  # fmt: skip
        where = machine(230 * MIB)
        check_bytes(create_deepseek_v4_manager(WIDE, config, where), config, where)


def test_a_worker_that_computes_prompts_is_sized_for_their_steps() -> None:
    config = worker(False, changes={"generation_only": False}, max_num_tokens=400)
    made = create_deepseek_v4_manager(MODEL, config, machine())
    assert made.config.max_num_tokens == 400
    check_bytes(made, config, machine())
    made.add_request(1, 900)
    step = made.prepare_step([StepRequest(1, 0, 390, is_context=True)])
    assert any(step.scratch.values())  # windows of the step share slots
    made.abort_step()
    made.free_request(1)
    decode(made)
    decodes_only = create_deepseek_v4_manager(MODEL, worker(False, max_num_tokens=400), machine())
    assert decodes_only.config.max_num_tokens is None


def test_the_pools_that_were_planned_hold_the_tokens_that_were_promised() -> None:
    """Requests of exactly whole pages, whose windows cross into the last one."""
    config, where = worker(False, 4, 1024, tokens_per_block=256), machine(20 * MIB)
    made = create_deepseek_v4_manager(WIDE, config, where)
    _, sizing = size_checked(config, made.config.geometry, where, SingleRank())
    promised = min(sizing.capacity.batch, pool_tokens(sizing.device) // 1024)
    assert promised >= 1
    for request in range(promised):
        made.add_request(request, 1024)
        made.import_history(request, cases.history(made.config.geometry, request, 768))
    made.prepare_step([StepRequest(request, 768) for request in range(promised)])
    made.abort_step()


def test_presets_files_and_geometries_are_models_too(tmp_path: Path) -> None:
    geometry = cases.geometry()
    made = create_deepseek_v4_manager(geometry, worker(True), machine())
    assert made.config.geometry is geometry
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for source in (tmp_path, tmp_path / "config.json"):
        read = create_deepseek_v4_manager(source, worker(True), machine()).config.geometry
        assert read.compress_ratios == geometry.compress_ratios
    config, where = worker(True, 1, 600, dtype="fp8", index_dtype="fp8"), machine(2 * GIB)
    made = create_deepseek_v4_manager("deepseek-v4-flash", config, where)
    assert made.config.geometry == load_geometry("deepseek-v4-flash")
    assert len(made.access.arenas) == 21
    check_bytes(made, config, where)


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        (tiny_dsa(), worker(True), kvcm.InvalidArgument, "must be a DeepSeek-V4 model, got tiny"),
        (
            MODEL,
            worker(True, use_kv_cache_manager_v2=False),
            kvcm.InvalidArgument,
            "must be auto or true with DeepSeek-V4, which only version 2",
        ),
        (
            MODEL,
            worker(False, use_kv_cache_manager_v2=False),
            kvcm.InvalidArgument,
            "must be auto or true with DeepSeek-V4, which only version 2",
        ),
        (
            MODEL,
            worker(True, changes={"num_batches": 2}),
            kvcm.InvalidArgument,
            "num_batches must be 1: .* got 2",
        ),
        (
            MODEL,
            worker(True, tokens_per_block=384),
            kvcm.InvalidArgument,
            "tokens_per_block must be 128 or 256, got 384",
        ),
        (
            MODEL,
            worker(True, longest=5000),
            kvcm.InvalidArgument,
            r"max_seq_len must be in \[1, 4096\]",
        ),
        (MODEL, worker(False, managed_by_another=True), NotImplementedError, "KV connectors"),
        (MODEL, worker(False, changes={"max_beam_width": 2}), NotImplementedError, "got 2"),
        *(
            (
                MODEL,
                worker(offload, changes={"max_draft_len": 2}),
                kvcm.InvalidArgument,
                "max_draft_len must be 0: .* got 2",
            )
            for offload in (False, True)
        ),
        (
            WIDE,
            worker(False, dtype="nvfp4"),
            kvcm.InvalidArgument,
            "pages of two sizes .* nvfp4 and bf16, 8192 B each; take another of either, or offload",
        ),
        (
            MODEL,
            worker(False, changes={"context_parallel": {"size": 2, "kind": "helix"}}),
            NotImplementedError,
            "got helix",
        ),
        (
            MODEL,
            worker(True, changes={"cache_transceiver_config": None}),
            NotImplementedError,
            "disaggregated generation",
        ),
        (
            MODEL,
            worker(True, changes={"generation_only": False}),
            kvcm.InvalidArgument,
            "generation_only must be true",
        ),
        (
            MODEL,
            worker(True, batch=5000),
            kvcm.InvalidArgument,
            "max_batch_size must be <= .* binds: ",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_memory_is_taken(
    model: Any, config: WorkerConfig, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(factory, "DeepseekV4CacheManager", fail)
    with pytest.raises(error, match=message):
        create_deepseek_v4_manager(model, config, machine())


def test_each_function_sends_the_other_s_models_away() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="must be a DSA model, got .* deepseek_v4"):
        create_dsa_manager(cases.geometry(), worker(True), machine())
    with pytest.raises(kvcm.InvalidArgument, match="must be a DeepSeek-V4 model, got .* dsa"):
        create_deepseek_v4_manager("glm-5.2", worker(True), machine())


def test_an_automatic_cache_factor_is_chosen() -> None:
    config = worker(True, longest=2048)
    attention = config.sparse_attention_config.model_dump()
    attention["kv_cache_offload_config"] = {"gpu_cache_factor": "auto"}
    config = worker(True, longest=2048, changes={"sparse_attention_config": attention})
    made = create_deepseek_v4_manager(MODEL, config, machine())
    assert made.config.offload is not None
    assert made.config.offload.cached_slots >= cases.TOP_K


def test_what_fails_on_another_rank_fails_here() -> None:
    class Two(SingleRank):
        def __init__(self, last: int = 0) -> None:
            self.calls, self.last = itertools.count(1), last

        def gather(self, message: str) -> list[str]:
            self.count = next(self.calls)
            return [message, "no memory" if self.count == self.last else message]

    ranks = Two()
    create_deepseek_v4_manager(MODEL, worker(True), machine(), ranks)
    with pytest.raises(OtherRankError, match="no memory"):  # the last thing agreed on is memory
        create_deepseek_v4_manager(MODEL, worker(True), machine(), Two(ranks.count))


def test_host_memory_that_one_request_does_not_fit_into_is_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="host"):
        create_deepseek_v4_manager(MODEL, worker(True), machine(host=available(100_000)))
