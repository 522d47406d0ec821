"""Mount state: shared memory of a mount that outlives the serving process."""
