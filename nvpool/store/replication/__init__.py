"""Chain replication: writes along a chain, catch-up and transfer of chunks."""
