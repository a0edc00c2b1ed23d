"""The DeepSeek-V4 adapter: seven kinds of cache, resident or with ratio-4 history on the host.

    choice     what `use_kv_cache_manager_v2` means
    config     what a manager is made from
    codecs     windows and entries as kernels store them
    indices    conversions of indices, as functions
    pools      the buffers of an attention type
    access     reading and writing them
    history    what a request brings from elsewhere
    step       the tensors of a step
    manager    all of it

Nothing here imports torch before a manager is made or an array handed in.
"""

from sparse_kvcm.adapter.config import OffloadSizes
from sparse_kvcm.deepseek_v4.choice import choose_version
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.history import DeepseekV4History, least_inputs
from sparse_kvcm.deepseek_v4.indices import AttentionIndices
from sparse_kvcm.deepseek_v4.manager import DeepseekV4CacheManager
from sparse_kvcm.deepseek_v4.step import DeepseekV4Step
from sparse_kvcm.models import AttentionType

__all__ = [
    "AttentionIndices",
    "AttentionType",
    "DeepseekV4CacheConfig",
    "DeepseekV4CacheManager",
    "DeepseekV4History",
    "DeepseekV4Step",
    "OffloadSizes",
    "choose_version",
    "least_inputs",
]
