"""How a metadata shard does with very many files; see bench/scale.py."""
