"""Vocabulary of nvpool: errors, identifiers, units, clock and configuration.

The lowest layer: imports no other package of nvpool.
"""
