"""The job before any communication: launchers, host lists, binding, settings, bootstrap and the sentinel.

The only package that reads `os.environ`. Bare Python: it runs on a login node without MPI or torch.
"""
