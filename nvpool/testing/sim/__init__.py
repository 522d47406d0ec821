"""A whole pool in one process, in time that is only counted: the same seed does the same again. See `scenario`."""
