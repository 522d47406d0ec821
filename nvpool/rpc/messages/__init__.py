"""Packed forms of messages that would be slow as protobuf."""
