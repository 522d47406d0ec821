"""Test support in the package: fakes, fault injection, whole pools on this host, simulator, contract tests.

No other package imports it. Test suites and benchmarks do.
"""
