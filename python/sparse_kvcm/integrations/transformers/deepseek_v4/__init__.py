"""Decode stock DeepSeek-V4 models on a `DeepseekV4CacheManager`, resident or offloaded.

`attach` puts forward hooks on a model; a :class:`ManagedV4Cache` is then what it takes as its
cache, in `generate` or in `forward`. A batch has requests of one length, as V4's compressors have
one phase for all rows; a :class:`V4StepDriver` runs requests of any lengths, each in a forward of
its own, in one step of the manager. Attention is stock "eager"; nothing in transformers is patched.
"""

from sparse_kvcm.integrations.transformers import _requirements  # isort: skip

_requirements.check()

from sparse_kvcm.integrations.transformers.deepseek_v4.attention import (  # noqa: E402
    IMPLEMENTATION,
    register,
)
from sparse_kvcm.integrations.transformers.deepseek_v4.cache import ManagedV4Cache  # noqa: E402
from sparse_kvcm.integrations.transformers.deepseek_v4.driver import (  # noqa: E402
    V4Request,
    V4StepDriver,
)
from sparse_kvcm.integrations.transformers.deepseek_v4.hooks import attach  # noqa: E402

register()

__all__ = ["IMPLEMENTATION", "ManagedV4Cache", "V4Request", "V4StepDriver", "attach"]
