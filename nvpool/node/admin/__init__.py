"""Admin commands that a supervisor carries out: drives, nodes, shards, certificates, scrubbing."""
