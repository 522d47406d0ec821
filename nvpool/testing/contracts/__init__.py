"""Contracts: tests that every implementation of an interface passes."""
