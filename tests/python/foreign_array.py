"""An array that DLPack says is on another device. It has no memory; it is there to be refused."""

from __future__ import annotations

import ctypes
from typing import Any

CUDA = 2


class _Tensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, before version 1."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class ForeignArray:
    """int32 of the given shape on a device."""

    def __init__(self, shape: tuple[int, ...], device: tuple[int, int] = (CUDA, 0)) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._tensor = _Tensor(
            data=256,
            device_type=device[0],
            device_id=device[1],
            ndim=len(shape),
            code=0,
            bits=32,
            lanes=1,
            shape=self._shape,
        )
        self.device = device

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
