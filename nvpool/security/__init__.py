"""Certificate authority, TLS, join tokens, volume encryption, and the format of the audit log."""
