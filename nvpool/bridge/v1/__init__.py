"""Messages of CSI, generated from proto/csi."""
