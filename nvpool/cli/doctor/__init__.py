"""`nvpool doctor`: checks of a machine and of a pool."""
