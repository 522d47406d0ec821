"""The command-line interface `nvpool`."""
