"""Remote procedure calls: connections, transports, limits, access control and wire error codes."""
