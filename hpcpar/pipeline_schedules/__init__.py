"""Pipeline schedules as values: made, proved, priced and drawn with bare Python."""
