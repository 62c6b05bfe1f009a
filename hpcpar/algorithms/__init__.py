"""Collective algorithms as data: pure generators of steps, and what proves, prices and draws them."""
