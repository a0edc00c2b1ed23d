"""Benchmarks that are written in Python; those of kernels are in cpp/benchmarks."""
