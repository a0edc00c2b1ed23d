"""Disaggregated serving: pages of a request go from who computed them to who decodes.

`page_table` says what a side has, `transport` moves bytes, `wire` is what the sides say to each
other. Needs msgspec: ``pip install sparse_kvcm[transfer]``.
"""
