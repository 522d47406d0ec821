"""Loads of `nvpool bench`."""
