"""Benchmark loads of `nvpool bench`."""
