"""Facts of this machine: its processes, its mounts, and the files of a pool directory."""
