"""Server of a store: requests, rights, serving lease and statistics."""
