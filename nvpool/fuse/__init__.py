"""Mount adapter: requests of the kernel become operations of the client."""
