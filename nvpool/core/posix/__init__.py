"""POSIX rules shared by client, mount and metadata service: access control lists and byte ranges."""
