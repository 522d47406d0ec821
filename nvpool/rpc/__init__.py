"""Remote procedure calls: connections, limits, access control, and errors on the wire."""
