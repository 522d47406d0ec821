"""Sessions of clients, and the leases and locks that they hold."""
