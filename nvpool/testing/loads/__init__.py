"""Loads that check what they read."""
