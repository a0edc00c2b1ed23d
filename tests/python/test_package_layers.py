"""The arrows between the parts of the Python package point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "sparse_kvcm"

# Each part, lowest first; it may import those before it, and `_core`.
LAYERS = (
    "ops",
    "byte_counts",
    "models",
    "step",
    "dsa",
    "deepseek_v4",
    "transfer",
    "config",
    "decode_worker",
    "sizing",
    "planner",
    "base_manager",
    "factory",
    "cli",
)
LAZY = {"torch", "matplotlib", "transformers", "nixl_cu13", "nixl"}


def imports(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


def sources(layer: str) -> list[Path]:
    folder = PACKAGE / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{layer}.py"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_part_imports_only_parts_below_it(layer: str) -> None:
    allowed = {"_core", *LAYERS[: LAYERS.index(layer) + 1]}
    for path in sources(layer):
        for name in imports(ast.parse(path.read_text())):
            if name.startswith("sparse_kvcm."):
                assert name.split(".")[1] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_part_imports_a_heavy_library_when_it_is_imported(layer: str) -> None:
    for path in sources(layer):
        body = ast.parse(path.read_text()).body
        tops = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in tops for name in imports(node)}
        assert not names & LAZY, path


def test_only_the_transfer_needs_its_extra() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
        if name == "msgspec" or name.startswith("sparse_kvcm.transfer")
    }
    assert users == {"transfer"}
