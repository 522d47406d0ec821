"""Test support that is part of the package: fakes, fault injection, whole pools on this host, the simulator, contract tests.

Nothing outside of this package imports it. Test suites and benchmarks do.
"""
