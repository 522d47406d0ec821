"""State that a client caches: attributes, leases, dirty and small files, the pool map."""
