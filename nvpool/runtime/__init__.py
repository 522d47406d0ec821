"""Common parts of every daemon: event loop, signals, logs, audit log and metrics."""
