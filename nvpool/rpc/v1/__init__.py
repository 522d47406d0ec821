"""Messages of the wire protocol, generated from proto/nvpool/v1."""
