"""Background work of a store: scrub, repair and removal of orphan chunks."""
