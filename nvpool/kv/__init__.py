"""Key-value engine of the metadata service: journal, memory tables and LMDB."""
