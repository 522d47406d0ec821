"""Transports: TCP and unix sockets, RDMA, gRPC, and in-process."""
