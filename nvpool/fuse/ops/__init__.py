"""File operations of a mount, independent of the engine that speaks to the kernel."""
