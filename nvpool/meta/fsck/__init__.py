"""Check, repair, dump and load of the records of a shard."""
