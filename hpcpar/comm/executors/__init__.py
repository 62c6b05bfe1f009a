"""Executors of a compiled collective's steps: messages, shared memory, GPUs, MPI's own collectives."""
