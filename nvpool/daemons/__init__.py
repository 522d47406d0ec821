"""Main functions of the daemons: supervisor, metadata, store, etcd and bridge."""
