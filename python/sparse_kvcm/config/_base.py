"""What all configuration models share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sparse_kvcm._core import MAX_TIER_BYTES, InvalidArgument
from sparse_kvcm.byte_counts import parse_bytes

Model = TypeVar("Model", bound="ConfigModel")


def _to_bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[
    int,
    Field(
        gt=0,
        le=MAX_TIER_BYTES,
        description="Bytes; in YAML and JSON also a text such as 45.6GB or 64GiB.",
    ),
    BeforeValidator(_to_bytes),
]


class ConfigModel(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    @classmethod
    def from_text(cls: type[Model], text: str) -> Model:
        """Read YAML, of which JSON is a part.

        Raises
        ------
        InvalidArgument
            If it is no YAML. It is a ValueError.
        pydantic.ValidationError
            Naming each field that is wrong. It is a ValueError.
        """
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # also of scalars and nests
            raise InvalidArgument(f"[from_text] text must be YAML or JSON: {error}") from error
        return cls.model_validate(values)

    @classmethod
    def from_file(cls: type[Model], path: str | Path) -> Model:
        """Read a YAML or JSON file."""
        return cls.from_text(Path(path).read_text(encoding="utf-8"))

    def to_yaml(self) -> str:
        """Write what was set, defaults left out."""
        text: str = yaml.safe_dump(
            self.model_dump(mode="json", exclude_unset=True), sort_keys=False
        )
        return text
