"""Making pools and joining nodes to them."""
