"""CSI plugin."""
