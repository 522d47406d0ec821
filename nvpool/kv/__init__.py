"""Key-value engine of the metadata service and the chunk index: journal, memtables, LMDB and replication."""
