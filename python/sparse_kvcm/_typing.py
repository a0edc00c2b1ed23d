"""Types of arguments."""

from typing import Any, Protocol


class Array(Protocol):
    """An array that exports DLPack: of NumPy, torch, CuPy, JAX, or memory of a manager.

    It is taken without a copy. Its dtype, shape, device and strides must be exactly what the call
    asks for; nothing is converted.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the memory as a capsule."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Device type and index."""
