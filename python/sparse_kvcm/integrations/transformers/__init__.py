"""Decode stock transformers models with their latent KV history in host memory.

Importing this package registers the attention implementation ``"sparse_kvcm"``. A model runs under
the manager when it uses that implementation and an :class:`OffloadedCache`, in ``generate`` or in
its ``forward``; a :class:`StepDriver` calls ``forward`` for requests that join, leave, suspend and
resume between steps.

Nothing in transformers is patched: a cache class, a registered attention function and a registered
mask function are all that is used.
"""

from sparse_kvcm.integrations.transformers import _requirements  # isort: skip

_requirements.check()

from sparse_kvcm.integrations.transformers.attention import IMPLEMENTATION, register  # noqa: E402
from sparse_kvcm.integrations.transformers.cache import OffloadedCache  # noqa: E402
from sparse_kvcm.integrations.transformers.driver import (  # noqa: E402
    Request,
    RequestState,
    StepDriver,
    greedy,
)
from sparse_kvcm.integrations.transformers.geometry import (  # noqa: E402
    DsaGeometry,
    manager_config,
)
from sparse_kvcm.integrations.transformers.statistics import GroupStatistics  # noqa: E402
from sparse_kvcm.integrations.transformers.steps import DecodeError  # noqa: E402

register()

__all__ = [
    "IMPLEMENTATION",
    "DecodeError",
    "DsaGeometry",
    "GroupStatistics",
    "OffloadedCache",
    "Request",
    "RequestState",
    "StepDriver",
    "greedy",
    "manager_config",
    "register",
]
