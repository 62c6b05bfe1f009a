"""Who am I, before any communication: launchers, host lists, binding, settings, and the sentinel.

The only room that reads `os.environ`. Bare Python: it runs on a login node without MPI or torch.
"""
