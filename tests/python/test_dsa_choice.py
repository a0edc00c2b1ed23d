"""Which manager a model gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.dsa import V2_ARCHITECTURES, ManagerFeatures, choose_version

AUTO: Any = "auto"


@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV32", "GlmMoeDsa", "MistralLarge3"])
def test_auto_is_version_2_for_the_known_models(name: str) -> None:
    assert choose_version(AUTO, f"{name}ForCausalLM") == 2
    assert choose_version(False, f"{name}ForCausalLM") == 1
    assert len(V2_ARCHITECTURES) == 4


@pytest.mark.parametrize(("choice", "version"), [(AUTO, 1), (True, 2), (False, 1)])
def test_auto_is_version_1_for_other_models(choice: Any, version: int) -> None:
    assert choose_version(choice, "LlamaForCausalLM") == version


@pytest.mark.parametrize("choice", [AUTO, True])
def test_version_2_refuses_and_never_becomes_version_1(choice: Any) -> None:
    name = "GlmMoeDsaForCausalLM"
    for features, message in (
        (ManagerFeatures(has_connector=True), "connectors .* use_kv_cache_manager_v2=False gives"),
        (ManagerFeatures(beam_width=2), "beam width must be 1 with either version, got 2"),
        (ManagerFeatures(context_parallel="star"), "STAR .* by either version"),
    ):
        with pytest.raises(NotImplementedError, match=rf"\[DSACacheManagerV2\].*{message}"):
            choose_version(choice, name, features)
    assert choose_version(choice, name, ManagerFeatures(context_parallel="helix")) == 2
    assert choose_version(choice, name, ManagerFeatures(offloads=True)) == 2


def test_version_1_takes_connectors_and_refuses_the_rest() -> None:
    name = "GlmMoeDsaForCausalLM"
    assert choose_version(False, name, ManagerFeatures(has_connector=True)) == 1
    for features in (ManagerFeatures(beam_width=2), ManagerFeatures(context_parallel="star")):
        with pytest.raises(NotImplementedError, match=r"\[DSACacheManager\]"):
            choose_version(False, name, features)
    with pytest.raises(kvcm.InvalidArgument, match="=True gives DSACacheManagerV2, which offloads"):
        choose_version(False, name, ManagerFeatures(offloads=True))


@pytest.mark.parametrize("choice", ["v2", None, 3])
def test_another_choice_is_refused(choice: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match="must be auto, true or false, got"):
        choose_version(choice, "GlmMoeDsaForCausalLM")
