"""Protobuf messages of CSI, generated from proto/csi."""
