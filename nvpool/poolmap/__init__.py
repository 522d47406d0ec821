"""The pool map, and its changes as pure functions: no I/O, no clock, no await."""
