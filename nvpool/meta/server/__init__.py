"""Server of a shard member: dispatch, commit gate, role and replication."""
