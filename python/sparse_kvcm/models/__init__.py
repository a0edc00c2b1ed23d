"""Geometry of models, from presets or from their ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.byte_counts import shorten
from sparse_kvcm.models._dtypes import IndexDtype, KvDtype, window_dtype
from sparse_kvcm.models.attention_types import AttentionType
from sparse_kvcm.models.compute import ModelCompute
from sparse_kvcm.models.geometry import DeepSeekV4Geometry, DsaGeometry, ModelGeometry

__all__ = [
    "AttentionType",
    "DeepSeekV4Geometry",
    "DsaGeometry",
    "IndexDtype",
    "KvDtype",
    "ModelCompute",
    "ModelGeometry",
    "geometry_of",
    "load_config",
    "load_geometry",
    "presets",
    "window_dtype",
]

_READERS: dict[str, Callable[[str, Mapping[str, Any]], ModelGeometry]] = {
    "deepseek_v32": DsaGeometry.from_config,
    "glm_moe_dsa": DsaGeometry.from_config,
    "deepseek_v4": DeepSeekV4Geometry.from_config,
}


@cache
def _read_presets() -> dict[str, dict[str, Any]]:
    text = resources.files(__name__).joinpath("presets.json").read_text(encoding="utf-8")
    presets: dict[str, dict[str, Any]] = json.loads(text)
    return presets


def presets() -> dict[str, list[str]]:
    """Names of the models that are known, with the sources of their figures."""
    return {name: list(preset["sources"]) for name, preset in _read_presets().items()}


def geometry_of(config: Mapping[str, Any], name: str = "config") -> ModelGeometry:
    """Read the geometry off the configuration of a Hugging Face model.

    Parameters
    ----------
    config : mapping
        As in ``config.json``: ``model_type`` and what that type needs.
    name : str
        What to call it.

    Raises
    ------
    InvalidArgument
        Naming the field, its bound and its value.
    """
    if not isinstance(config, Mapping):
        raise InvalidArgument(
            f"[ModelGeometry] config must be a mapping, as in config.json, got {config!r:.40}"
        )
    read = _READERS.get(str(config.get("model_type")))
    if read is None:
        raise InvalidArgument(
            f"[ModelGeometry] model_type must be one of {', '.join(_READERS)}, "
            f"got {config.get('model_type')!r}"
        )
    return read(name, config)


def load_geometry(model: str | Path) -> ModelGeometry:
    """Read the geometry of a preset, of a ``config.json``, or of a folder with one.

    Raises
    ------
    InvalidArgument
        If `model` is neither.
    """
    name, config = load_config(model)
    return geometry_of(config, name)


def load_config(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Read what `load_geometry` reads its geometry off, and what to call it.

    Raises
    ------
    InvalidArgument
        If `model` is neither.
    """
    preset = _read_presets().get(str(model))
    if preset is not None:
        return str(model), preset["config"]
    try:
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        text = path.read_bytes()
    except (OSError, ValueError, TypeError) as error:  # no such file, or no path at all
        raise InvalidArgument(
            f"[load_geometry] model must be one of {', '.join(_read_presets())} or the path of a "
            f"config.json, got {shorten(str(model))}"
        ) from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"[load_geometry] {path} must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"[load_geometry] {path} must be a JSON object")
    return path.parent.name or str(path), config
