"""Engine on /dev/fuse: connection, dispatch, notifications and read workers."""
