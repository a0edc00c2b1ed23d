"""What ``use_kv_cache_manager_v2`` means for DeepSeek-V4: there is version 2 alone.

    "auto", True   version 2: `DeepseekV4CacheManager`, resident or offloaded
    False          refused: no manager of version 1 keeps windows and compressor states

What version 2 does not do (KV connectors, beams, context parallelism) is refused too, and never
done by another manager instead.
"""

from __future__ import annotations

from typing import Literal

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.config import ManagerFeatures

MANAGER = "DeepseekV4CacheManager"


def choose_version(
    use_kv_cache_manager_v2: bool | Literal["auto"], features: ManagerFeatures | None = None
) -> Literal[2]:
    """Resolve ``use_kv_cache_manager_v2``.

    Raises
    ------
    InvalidArgument
        For False, and for another value.
    NotImplementedError
        For what the manager does not do.
    """
    if use_kv_cache_manager_v2 is False:
        raise InvalidArgument(
            "[choose_version] use_kv_cache_manager_v2 must be auto or true with DeepSeek-V4, which "
            f"only version 2, {MANAGER}, keeps; got False"
        )
    if use_kv_cache_manager_v2 not in ("auto", True):
        raise InvalidArgument(
            "[choose_version] use_kv_cache_manager_v2 must be auto or true with DeepSeek-V4, "
            f"got {use_kv_cache_manager_v2!r}"
        )
    refuse(features or ManagerFeatures())
    return 2


def refuse(features: ManagerFeatures) -> None:
    """Refuse what `DeepseekV4CacheManager` does not do.

    Raises
    ------
    NotImplementedError
        Naming the feature.
    """
    if features.has_connector:
        raise NotImplementedError(f"[{MANAGER}] KV connectors are not supported")
    if features.beam_width != 1:
        raise NotImplementedError(f"[{MANAGER}] beam width must be 1, got {features.beam_width}")
    if features.context_parallel != "none":
        raise NotImplementedError(
            f"[{MANAGER}] context parallelism is not supported, got {features.context_parallel}"
        )
