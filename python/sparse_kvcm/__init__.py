"""KV cache manager for sparse attention with its history in host memory.

`KvCacheManager` owns the memory; `KvCache` is one request; `Batch` takes requests through decode
steps. `sparse_kvcm.ops` has the same operations, stateless, on arrays of the caller. Sizes are in
units: what a selection names, a token or a compressed entry.
"""

from . import _core, ops
from ._core import (
    Batch,
    BatchErrorBits,
    DecodedEntry,
    ErrorBits,
    InvalidArgument,
    InvalidState,
    KvCache,
    KvCacheManager,
    KvCacheManagerConfig,
    KvCacheState,
    Lease,
    MemoryUse,
    NotAvailable,
    Occupancy,
    OutOfPages,
    ResizeResult,
    SelectionGroupConfig,
    StepError,
    StepErrors,
    UnitLayout,
    cuda_is_available,
    cuda_unavailable_reason,
)
from .ops import ResolveOutputs

__version__ = _core.version()

__all__ = [
    "Batch",
    "BatchErrorBits",
    "DecodedEntry",
    "ErrorBits",
    "InvalidArgument",
    "InvalidState",
    "KvCache",
    "KvCacheManager",
    "KvCacheManagerConfig",
    "KvCacheState",
    "Lease",
    "MemoryUse",
    "NotAvailable",
    "Occupancy",
    "OutOfPages",
    "ResizeResult",
    "ResolveOutputs",
    "SelectionGroupConfig",
    "StepError",
    "StepErrors",
    "UnitLayout",
    "__version__",
    "cuda_is_available",
    "cuda_unavailable_reason",
    "ops",
]
