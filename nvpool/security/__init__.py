"""Certificate authority, TLS, join tokens, and the form of the audit log."""
