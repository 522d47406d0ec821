"""The nvpool command."""
