"""Packed binary encodings of messages that would be slow as protobuf."""
