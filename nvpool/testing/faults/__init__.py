"""Fault injection: power loss, failing and lying drives. Shipped, so that users of nvpool can run it too.

`preload` builds and configures a small C library that is preloaded into a daemon; `powerloss` rebuilds from its record what
the drive could hold had the power gone at any moment.
"""
