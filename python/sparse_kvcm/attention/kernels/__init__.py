"""Triton kernels, and nothing else: modules here import triton, so they are imported when called.

They run compiled on a GPU, and on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``, set
before triton is imported), one program after the other in NumPy. Numbers are converted by integer
arithmetic and divisions are IEEE's, so both give the same bytes.
"""
