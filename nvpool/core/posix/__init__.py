"""Rules of POSIX that client, mount and metadata service share: access control lists and byte ranges."""
