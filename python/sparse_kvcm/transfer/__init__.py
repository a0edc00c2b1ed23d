"""Disaggregated serving: pages of a request go from who computed them to who decodes.

    page_table, tables, history   what a side has, and how a manager's buffers become that
    wire, ranks                   what the sides say to each other, and which of them sends
    transport, nixl, in_process   what moves bytes
    projection                    tokens of a request as ranges of bytes
    sender, ledger, offers        the sending side: its calls, its book, what the book has
    source, slices, bounce        its manager, and a slice's bytes on their way
    receiver, attempts            the receiving side: its calls, what it knows of a request
    target, staging               its manager, and the slots in which history arrives
    copier                        copies within the process

Needs msgspec: ``pip install sparse_kvcm[transfer]``.
"""

try:
    import msgspec as _msgspec  # noqa: F401  looked for here, so that who lacks it is told what to do
except ImportError as error:
    raise ImportError(
        "[sparse_kvcm.transfer] msgspec is not installed: pip install sparse_kvcm[transfer]"
    ) from error
