"""The attention side: what lies between a manager's slots and an attention kernel."""

from sparse_kvcm.attention.layouts import Part, RecordLayout, Region, dsa_layout, v4_layout

__all__ = ["Part", "RecordLayout", "Region", "dsa_layout", "v4_layout"]
