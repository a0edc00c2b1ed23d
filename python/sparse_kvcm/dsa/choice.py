"""Which manager a DSA model gets, and what no manager of version 2 does.

``use_kv_cache_manager_v2``

    "auto"   version 2 for the architectures of `V2_ARCHITECTURES`, version 1 for others
    True     version 2: `DSACacheManagerV2`, resident or offloaded
    False    version 1: `DSACacheManager`, which keeps everything on the GPU: the baseline

`sparse_kvcm.factory.create_dsa_manager` reads it from ``kv_cache_config`` and makes the manager.

What the manager chosen cannot do is refused. It never becomes the other one by itself:

    feature                 version 2   version 1
    KV connectors           refused     allowed: its pages never move
    beam width > 1          refused     refused: beams would share a history
    STAR context parallel   refused     refused: a rank has whole requests
    offload to the host     allowed     refused
    suspended pages on it   allowed     refused: they stay on the GPU
    prompts in steps        resident    allowed

A manager refuses for itself, too, by whoever it is made.
"""

from __future__ import annotations

from typing import Literal

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.config import ManagerFeatures

V2_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "MistralLarge3ForCausalLM",
)

Version = Literal[1, 2]


def choose_version(
    use_kv_cache_manager_v2: bool | Literal["auto"],
    architecture: str,
    features: ManagerFeatures | None = None,
) -> Version:
    """Resolve ``use_kv_cache_manager_v2`` for a model.

    Parameters
    ----------
    use_kv_cache_manager_v2 : bool or "auto"
    architecture : str
        As in ``architectures`` of ``config.json``.
    features : ManagerFeatures, optional
        None: nothing beyond what every manager does.

    Raises
    ------
    NotImplementedError
        If the version does not have a feature, naming the other one where that has it.
    InvalidArgument
        For another value, and for offload with version 1.
    """
    features = ManagerFeatures() if features is None else features
    if use_kv_cache_manager_v2 not in ("auto", True, False):
        raise InvalidArgument(
            "[choose_version] use_kv_cache_manager_v2 must be auto, true or false, "
            f"got {use_kv_cache_manager_v2!r}"
        )
    auto = use_kv_cache_manager_v2 == "auto"
    if architecture in V2_ARCHITECTURES if auto else use_kv_cache_manager_v2:
        refuse_in_v2("DSACacheManagerV2", features)
        return 2
    refuse_in_v1(features)
    return 1


def refuse_in_v2(manager: str, features: ManagerFeatures) -> None:
    """Refuse what no manager of version 2 does.

    Raises
    ------
    NotImplementedError
        Naming `manager` and the feature.
    """
    if features.has_connector:
        raise NotImplementedError(
            f"[{manager}] KV connectors are not supported; use_kv_cache_manager_v2=False gives "
            "DSACacheManager, which supports them"
        )
    _refuse_beams_and_star(manager, features)


def refuse_in_v1(features: ManagerFeatures) -> None:
    """Refuse what `DSACacheManager` does not do.

    Raises
    ------
    NotImplementedError
        For beams and STAR.
    InvalidArgument
        For offload.
    """
    _refuse_beams_and_star("DSACacheManager", features)
    if features.offloads:
        raise InvalidArgument(
            "[DSACacheManager] enable_kv_cache_offload must be false: it keeps everything on the "
            "GPU; use_kv_cache_manager_v2=True gives DSACacheManagerV2, which offloads"
        )


def _refuse_beams_and_star(manager: str, features: ManagerFeatures) -> None:
    if features.beam_width != 1:
        raise NotImplementedError(
            f"[{manager}] beam width must be 1 with either version, got {features.beam_width}"
        )
    if features.context_parallel == "star":
        raise NotImplementedError(
            f"[{manager}] STAR context parallelism is not supported by either version"
        )
