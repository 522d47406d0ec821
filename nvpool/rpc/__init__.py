"""Remote procedure calls: connections, transports, limits, access control and error codes of the wire
protocol."""
