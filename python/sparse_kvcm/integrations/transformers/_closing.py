"""What is closed at the end of a with block."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing:
    """A context that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
