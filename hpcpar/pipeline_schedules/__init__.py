"""Pipeline schedules as values: made, proved, simulated and drawn with bare Python."""
