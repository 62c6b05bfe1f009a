"""What runs the steps of a compiled collective: messages, shared memory, GPUs, MPI's own collectives."""
