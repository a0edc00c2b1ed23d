"""What a CUDA graph cannot capture, found without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):
    """Fails at what waits for a GPU: a value that goes to or comes from it, a shape after data."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "lift_fresh")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.waits, name
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), name
        return func(*args, **(kwargs or {}))
