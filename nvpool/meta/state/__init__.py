"""Records of a shard: their encoding, and the transactions that change them."""
