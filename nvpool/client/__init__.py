"""Client of a pool: what a mount and the SDK use."""
