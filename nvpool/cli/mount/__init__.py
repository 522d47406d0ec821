"""`nvpool mount` and `umount`, and the helper of mount(8)."""
