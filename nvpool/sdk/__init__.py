"""Python SDK of a pool: a synchronous and an asyncio file system API."""
