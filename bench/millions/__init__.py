"""Parts of bench/scale.py: a metadata shard with millions of files."""
