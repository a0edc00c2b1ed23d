"""From a model and a worker's configuration to the right DSA manager, with the memory sized."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

import sparse_kvcm as kvcm
from sizing_cases import GIB, MIB, machine, tiny_v4, worker_config
from sparse_kvcm.base_manager import size_checked
from sparse_kvcm.config import WorkerConfig

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm import factory  # noqa: E402
from sparse_kvcm.dsa import DSACacheManager, DSACacheManagerV2  # noqa: E402
from sparse_kvcm.factory import create_deepseek_v4_manager, create_dsa_manager  # noqa: E402
from sparse_kvcm.models import load_geometry  # noqa: E402
from sparse_kvcm.sizing import OtherRankError, SingleRank  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

MODEL = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 6,
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
    "kv_lora_rank": cases.RANK,
    "qk_rope_head_dim": cases.ROPE,
    "index_topk": cases.TOP_K,
    "max_position_embeddings": 4096,
}


def resident(**changes: Any) -> WorkerConfig:
    fields = worker_config(2, 200, tokens_per_block=8, **changes).model_dump()
    fields["sparse_attention_config"]["enable_kv_cache_offload"] = False
    return WorkerConfig.model_validate(fields)


def decode(manager: Any) -> None:
    """A prompt and a step; what is gathered is what was written."""
    model = manager.config.geometry
    manager.add_request(1, 100)
    manager.import_history(1, *cases.history(model, 1, 0, 50))
    manager.prepare_step([StepRequest(1, 50)])
    selection = torch.arange(35, 51, dtype=torch.int32)[None]
    gathered = cases.write_tokens(manager, dict.fromkeys(range(len(model.groups)), selection))
    wanted = cases.latents(1, 3, range(35, 50)).clamp(-448, 448)
    assert torch.allclose(gathered[3][0, :15], wanted, rtol=1 / 8, atol=1 / 256)
    manager.end_step()
    assert manager.frontier(1) == 51


def test_an_offloading_worker_gets_version_2_with_the_memory_sized() -> None:
    config = worker_config(2, 200, tokens_per_block=8)
    manager = create_dsa_manager(MODEL, config, machine())
    assert isinstance(manager, DSACacheManagerV2)
    got, sized = manager.manager.config, manager.config
    assert sized.offload is not None
    assert got.host_pages == sized.offload.host_pages >= 2 * 25
    assert (got.cached_slots, got.window_slots, got.max_leases) == (32, 8, 2)
    assert got.arena_pages == 2 * 5
    _, sizing = size_checked(config, sized.geometry, machine(), SingleRank())
    assert sizing.manager is not None
    assert manager.manager.memory_use() == kvcm.planned_memory(sizing.manager)
    decode(manager)


@pytest.mark.parametrize("choice", ["auto", True])
def test_a_resident_worker_gets_version_2(choice: Any) -> None:
    manager = create_dsa_manager(MODEL, resident(use_kv_cache_manager_v2=choice), machine())
    assert isinstance(manager, DSACacheManagerV2)
    assert manager.manager.num_groups == 0
    assert manager.manager.memory_use().host_bytes == 0
    assert manager.manager.storage.layout.num_levels == 1
    decode(manager)


@pytest.mark.parametrize(
    ("choice", "architecture"), [(False, "GlmMoeDsaForCausalLM"), ("auto", "NewForCausalLM")]
)
def test_version_1_is_had_by_choice_or_for_another_architecture(
    choice: Any, architecture: str
) -> None:
    model = MODEL | {"architectures": [architecture]}
    manager = create_dsa_manager(model, resident(use_kv_cache_manager_v2=choice), machine())
    assert isinstance(manager, DSACacheManager)
    decode(manager)


@pytest.mark.parametrize("source", ["file", "folder", "mapping"])
def test_an_architecture_counts_wherever_it_is_read(source: str, tmp_path: Path) -> None:
    model: Any = MODEL | {"architectures": ["OtherForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))
    model = {"file": tmp_path / "config.json", "folder": str(tmp_path), "mapping": model}[source]
    assert type(create_dsa_manager(model, resident(), machine())) is DSACacheManager


@pytest.mark.parametrize("names", ["GlmMoeDsaForCausalLM", 5, [5]])
def test_architectures_are_a_list_of_names(names: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match="architectures must be a list of names, got"):
        create_dsa_manager(MODEL | {"architectures": names}, resident(), machine())


@pytest.mark.parametrize("make", [create_dsa_manager, create_deepseek_v4_manager])
def test_a_configuration_and_a_machine_are_what_they_say(make: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"config must be a WorkerConfig, got {}"):
        make(MODEL, {}, machine())
    with pytest.raises(kvcm.InvalidArgument, match=r"machine must be a Machine, got None"):
        make(MODEL, resident(), None)


def test_suspended_requests_have_the_host_cache_of_the_configuration() -> None:
    manager = create_dsa_manager(MODEL, resident(host_cache_size=4 * MIB), machine())
    assert isinstance(manager, DSACacheManagerV2)
    assert manager.manager.storage.get_num_bytes(1) >= MIB
    decode(manager)
    manager.suspend_request(1)
    manager.resume_request(1)
    assert manager.prepare_step([StepRequest(1, 51)]).lengths.tolist() == [52]
    manager.abort_step()


def test_models_come_as_presets_and_geometries_too() -> None:
    geometry = cases.geometry()
    assert create_dsa_manager(geometry, resident(), machine()).config.geometry is geometry
    config = worker_config(1, 256)
    manager = create_dsa_manager("glm-5.2", config, machine(2 * GIB))
    assert manager.config.geometry == load_geometry("glm-5.2")
    assert sorted(manager.index_keys.layers)[:4] == [0, 1, 2, 6]


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        (tiny_v4(), resident(), kvcm.InvalidArgument, "model must be a DSA model, got tiny_v4"),
        (MODEL, resident(managed_by_another=True), NotImplementedError, "KV connectors are not"),
        (
            MODEL,
            worker_config(2, 200, use_kv_cache_manager_v2=False),
            kvcm.InvalidArgument,
            "enable_kv_cache_offload must be false.*=True gives DSACacheManagerV2",
        ),
        (
            MODEL,
            worker_config(2, 200, dtype="fp8_ds_mla", tokens_per_block=48),
            kvcm.InvalidArgument,
            "tokens_per_block must be 64 with kv_dtype fp8_ds_mla.* got 48",
        ),
        (
            MODEL,
            worker_config(2, 200, {"gpu_cache_factor": 5000.0}),
            kvcm.InvalidArgument,
            "gpu_cache_factor must be in .* got 5000",
        ),
        (
            MODEL,
            resident().model_copy(update={"num_batches": 2}),
            kvcm.InvalidArgument,
            "num_batches must be 1: .* one step open at a time, got 2",
        ),
        (MODEL, resident().model_copy(update={"max_beam_width": 2}), NotImplementedError, "got 2"),
        *(
            (
                MODEL,
                config.model_copy(update={"max_draft_len": 2}),
                kvcm.InvalidArgument,
                "max_draft_len must be 0: .* got 2",
            )
            for config in (resident(), resident(use_kv_cache_manager_v2=False), worker_config())
        ),
        (
            MODEL,
            worker_config().model_copy(update={"cache_transceiver_config": None}),
            NotImplementedError,
            "disaggregated generation",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_memory_is_taken(
    model: Any, config: WorkerConfig, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(factory, "DSACacheManager", fail)
    monkeypatch.setattr(factory, "DSACacheManagerV2", fail)
    with pytest.raises(error, match=message):
        create_dsa_manager(model, config, machine())


def test_star_names_the_version_that_refuses_it() -> None:
    changes = {"context_parallel": {"size": 2, "kind": "star"}}
    config = WorkerConfig.model_validate(resident().model_dump() | changes)
    with pytest.raises(NotImplementedError, match=r"\[DSACacheManagerV2\] STAR .* either version"):
        create_dsa_manager(MODEL, config, machine())


def test_what_fails_on_another_rank_fails_here() -> None:
    class Two(SingleRank):
        calls = 0

        def gather(self, message: str) -> list[str]:
            self.calls += 1
            return [message, "no memory" if self.calls == self.last else message]

        last = 0

    ranks = Two()
    create_dsa_manager(MODEL, resident(), machine(), ranks)
    failing = Two()
    failing.last = ranks.calls  # the last thing that ranks agree on is memory
    with pytest.raises(OtherRankError, match="no memory"):
        create_dsa_manager(MODEL, resident(), machine(), failing)


def test_the_example_runs() -> None:
    assert doctest.testmod(factory).failed == 0
