"""What Triton's functions need from the environment, refused by name when it is not there."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument

if TYPE_CHECKING:
    import torch

EXTRA = "pip install 'sparse_kvcm[triton]'"


def check() -> None:
    """Refuse, by ImportError, to go without torch or triton."""
    for needed in ("torch", "triton"):
        try:
            importlib.import_module(needed)
        except ImportError as error:
            raise ImportError(
                f"sparse_kvcm.attention needs {needed}, which cannot be imported ({error}). "
                f"Install it with: {EXTRA}"
            ) from error


def kernels(name: str) -> ModuleType:
    """Import a module of `sparse_kvcm.attention.kernels`.

    Raises
    ------
    ImportError
        If torch or triton is missing.
    """
    check()
    return importlib.import_module(f"sparse_kvcm.attention.kernels.{name}")


def launches_on(function: str, name: str, tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which Triton launches on a tensor's device.

    Raises
    ------
    InvalidArgument
        If Triton cannot run there: on the CPU it only interprets.
    """
    import torch

    check_device(function, name, tensor.device)
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def check_device(function: str, name: str, device: torch.device) -> None:
    """Refuse, by InvalidArgument, a device on which Triton cannot run."""
    import triton

    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        raise InvalidArgument(
            f"[{function}] {name} must be on a GPU, or on the CPU under Triton's interpreter "
            f"(TRITON_INTERPRET=1 before triton is imported), got {device}"
        )
