"""The version of this software, as pyproject.toml has it (a test compares them: asking the installed metadata takes 30 ms)."""

VERSION = "0.1.0"
