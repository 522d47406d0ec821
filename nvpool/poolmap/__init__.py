"""The pool map, and its changes as pure functions: no I/O, no clock, no await.

A change function takes a pool map and returns the next one; cluster/ and node/ decide when to call it.
"""
