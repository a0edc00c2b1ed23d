"""The DSA adapter: DeepSeek-V3.2 and GLM-5.x, resident (version 1) or offloaded (version 2).

    choice         which version a model gets, and what neither does
    config         what a manager is made from
    codecs         latents and index keys as kernels store them
    pools          the buffers of a role, and views of them
    latents        where latents are: pools, or the host and an arena
    step_tensors   the index tensors of a step
    manager        what both versions do alike; manager_v1, manager_v2
    replay         a draft model's turn

Nothing here imports torch before a manager is made or an array handed in.
"""

from sparse_kvcm.adapter.batch_store import StepFaultError
from sparse_kvcm.adapter.config import ManagerFeatures, OffloadSizes
from sparse_kvcm.adapter.slot_mapping import PageGeometry, SlotMapping
from sparse_kvcm.dsa.choice import (
    V2_ARCHITECTURES,
    choose_version,
    refuse_in_v2,
)
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.dsa.manager_v1 import DSACacheManager
from sparse_kvcm.dsa.manager_v2 import DSACacheManagerV2
from sparse_kvcm.dsa.replay import IndexerMetadata, draft_replay
from sparse_kvcm.dsa.step_tensors import DsaStep

__all__ = [
    "V2_ARCHITECTURES",
    "DSACacheManager",
    "DSACacheManagerV2",
    "DsaCacheConfig",
    "DsaManager",
    "DsaStep",
    "IndexerMetadata",
    "ManagerFeatures",
    "OffloadSizes",
    "PageGeometry",
    "SlotMapping",
    "StepFaultError",
    "choose_version",
    "draft_replay",
    "refuse_in_v2",
]
