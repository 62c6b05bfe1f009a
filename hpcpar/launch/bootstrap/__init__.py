"""Bootstrap of MPI_COMM_WORLD: by the launcher's PMI, or by a PMI-1 server of our own under plain srun."""
