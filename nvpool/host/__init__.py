"""Local machine: its processes, mounts, log files, and the files of a pool directory."""
