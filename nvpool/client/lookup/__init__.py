"""Look-ups of names: batches, prefetching, complete and striped directories."""
