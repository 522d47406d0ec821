"""Version of this software, equal to the one in pyproject.toml.

A test compares both. Reading the metadata of the installed package would take 30 ms.
"""

VERSION = "0.1.0"
