"""Administration requests that a supervisor carries out: drives, nodes, shards, certificates."""
