"""Block reads through a file descriptor, with preadv2 and io_uring."""
