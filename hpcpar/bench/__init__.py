"""Measuring collectives: beside the MPI library's own, to choose by, and to fit the cost model to."""
