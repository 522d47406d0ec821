"""CSI driver for Kubernetes."""
