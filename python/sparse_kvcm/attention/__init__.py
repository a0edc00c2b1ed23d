"""The attention side: what lies between a manager's slots and an attention kernel.

    layouts    how kernels find the parts of a stored unit
    pointers   where a layer's attention begins to read: the arena, or a pool
    rows       slots of a selection to rows that kernels read (Triton)
    write      a step's new units, quantised, to their slots (Triton)
    scratch    selected units side by side, for kernels that need that (Triton)
    steps      all of it for the open step of a manager
    dispatch   which implementation runs on a layer
    sparse_mla attention of decode steps over those rows (Triton); mla_torch, the same in torch

Nothing here imports torch or triton before a tensor is handed in. What is marked so needs both:
``pip install 'sparse_kvcm[triton]'``.
"""

from sparse_kvcm.attention.dispatch import AttentionImplementation, AttentionRegistry
from sparse_kvcm.attention.layouts import Part, RecordLayout, Region, dsa_layout, v4_layout
from sparse_kvcm.attention.mla_dispatch import mla_registry
from sparse_kvcm.attention.mla_torch import sparse_mla_torch
from sparse_kvcm.attention.pointers import (
    AttentionBase,
    PointerTable,
    attention_base,
    pointer_table,
)
from sparse_kvcm.attention.rows import RowForm, UncoveredUnitError, WindowRows, sparse_arena_rows
from sparse_kvcm.attention.scratch import KvScratch
from sparse_kvcm.attention.sparse_mla import KeyPart, sparse_mla_decode, workspace_bytes
from sparse_kvcm.attention.steps import row_form, step_rows, write_step
from sparse_kvcm.attention.write import write_latents

__all__ = [
    "AttentionBase",
    "AttentionImplementation",
    "AttentionRegistry",
    "KeyPart",
    "KvScratch",
    "Part",
    "PointerTable",
    "RecordLayout",
    "Region",
    "RowForm",
    "UncoveredUnitError",
    "WindowRows",
    "attention_base",
    "dsa_layout",
    "mla_registry",
    "pointer_table",
    "row_form",
    "sparse_arena_rows",
    "sparse_mla_decode",
    "sparse_mla_torch",
    "step_rows",
    "v4_layout",
    "workspace_bytes",
    "write_latents",
    "write_step",
]
