"""Fault injection: power loss, failing and lying drives. Part of the package, for operators and authors too.

`preload` builds and configures a small C library that is preloaded into a daemon; `power_loss` rebuilds from
its record a state that the drive could have after a power loss at any moment.
"""
