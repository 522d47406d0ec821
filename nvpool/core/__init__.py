"""Vocabulary of nvpool: errors, identifiers, units, clock and configuration. Imports nothing else of the package."""
