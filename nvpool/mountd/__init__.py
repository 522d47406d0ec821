"""Processes of a mount: server, holder, fork server and read workers."""
