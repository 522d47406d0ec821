"""`nvpool mount` and `nvpool umount`, and the helper `mount.nvpool` for mount(8)."""
