"""Loads that check the data that they read."""
