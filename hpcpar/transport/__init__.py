"""Transports, which move bytes between ranks: MPI, a loopback in one process, shared memory, GPUs."""
