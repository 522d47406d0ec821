"""Python API of a pool, synchronous and for asyncio."""
