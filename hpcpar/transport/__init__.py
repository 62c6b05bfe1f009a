"""How bytes move between ranks: MPI point-to-point, or a loopback of all ranks in one process."""
