"""Copies between addresses of one process: by memmove, or on a stream of a GPU.

The in-process transport moves bytes with one, the bounce region is filled and emptied with one.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from sparse_kvcm._core import DeviceMemoryError, NotAvailable
from sparse_kvcm.transfer.transport import SIZE, TARGET, Ranges

T = TypeVar("T")


class Copy(Protocol):
    """Copies that were started. A ``torch.cuda.Event`` is one, too."""

    def query(self) -> bool:
        """Whether all of them are done. Never waits."""


class Copier(ABC):
    """Copies ranges within the process."""

    @abstractmethod
    def start(self, ranges: Ranges) -> Copy:
        """Start copies of ranges as of `Transport.prepare`; the memory stays until they end.

        After an exception nothing moves.
        """


class Done:
    """Nothing to wait for."""

    def query(self) -> bool:
        """True."""
        return True


class HostCopier(Copier):
    """memmove; done when `start` returns."""

    def start(self, ranges: Ranges) -> Copy:
        """See `Copier`."""
        for source, target, size in ranges.tolist():
            ctypes.memmove(target, source, size)
        return Done()


_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class CudaCopier(Copier):
    """cuMemcpyAsync on a stream of its own; either side may be pinned host memory, or any GPU's.

    A range must not cross the border of two registrations of pinned memory, which are 2 GiB apart
    at least. What is copied must be written before `start`: it waits for no other stream.

    Parameters
    ----------
    device : int
        GPU whose stream it is.

    Raises
    ------
    NotAvailable
        Without a driver, or such a GPU.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotAvailable(f"[CudaCopier] no CUDA driver: {error}") from error
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        except DeviceMemoryError as error:
            raise NotAvailable(f"[CudaCopier] no GPU {device}: {error}") from error
        self._stream = ctypes.c_void_p()
        self._in_context(
            lambda: self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(1))
        )

    def start(self, ranges: Ranges) -> Copy:
        """See `Copier`."""
        try:
            copy: Copy = self._in_context(lambda: self._start(ranges))
        except Exception:  # waits for those that have begun; a dead context has none
            self._in_context(lambda: self._driver.cuStreamSynchronize(self._stream))
            raise
        return copy

    def _start(self, ranges: Ranges) -> Copy:
        for source, target, size in ranges.tolist():
            self._call(
                "cuMemcpyAsync",
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                self._stream,
            )
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))  # without timing
        self._call("cuEventRecord", event, self._stream)
        return _Event(self, event)

    def ended(self, event: ctypes.c_void_p) -> bool:
        """Whether an event has passed; then it is gone."""
        state: int = self._in_context(lambda: self._driver.cuEventQuery(event))
        if state == _NOT_READY:
            return False
        self._in_context(lambda: self._call("cuEventDestroy_v2", event))
        if state:
            raise DeviceMemoryError(f"[CudaCopier] copies failed with CUDA error {state}")
        return True

    def _in_context(self, work: Callable[[], T]) -> T:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            return work()
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        state = getattr(self._driver, name)(*arguments)
        if state:
            raise DeviceMemoryError(f"[CudaCopier] {name} failed with CUDA error {state}")


class _Event:
    """Copies on a GPU."""

    def __init__(self, copier: CudaCopier, event: ctypes.c_void_p) -> None:
        self._copier = copier
        self._event: ctypes.c_void_p | None = event
        self._fault: Exception | None = None

    def query(self) -> bool:
        """See `Copy`. What has failed says so each time."""
        if self._event is not None:
            try:
                if not self._copier.ended(self._event):
                    return False
            except Exception as error:  # the event is gone all the same
                self._fault = error
            self._event = None
        if self._fault is not None:
            raise self._fault
        return True


def gathered(ranges: Ranges, address: int) -> Ranges:
    """Ranges from the sources of `ranges`, side by side, to `address` on."""
    out: Ranges = ranges.copy()
    out[:, TARGET] = _side_by_side(address, ranges[:, SIZE])
    return out


def scattered(address: int, places: Ranges) -> Ranges:
    """Ranges from `address` on, where they lie side by side, to places: uint64 (n, 2)."""
    sizes = places[:, 1]
    out: Ranges = np.stack((_side_by_side(address, sizes), places[:, 0], sizes), axis=1)
    return out


def _side_by_side(address: int, sizes: Ranges) -> Ranges:
    out: Ranges = np.uint64(address) + np.cumsum(sizes) - sizes
    return out
