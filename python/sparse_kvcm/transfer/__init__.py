"""Disaggregated serving: pages of a request go from who computed them to who decodes.

`page_table` says what a side has, `transport` moves bytes, `wire` is what the sides say to each
other. Needs msgspec: ``pip install sparse_kvcm[transfer]``.
"""

try:
    import msgspec as _msgspec  # noqa: F401  looked for here, so that who lacks it is told what to do
except ImportError as error:
    raise ImportError(
        "[sparse_kvcm.transfer] msgspec is not installed: pip install sparse_kvcm[transfer]"
    ) from error
