"""Our collectives beside MPI's own, gloo and Horovod: `hpcpar bench collectives`, as a script.

    mpiexec -n 2 python benchmarks/collectives.py
    mpiexec -n 4 python benchmarks/collectives.py --collective allgather --json allgather.jsonl

`--help` lists the options; `hpcpar/bench/` has the measuring.
"""

from __future__ import annotations

import sys

from hpcpar.cli import main

if __name__ == "__main__":
    main(["bench", "collectives", *sys.argv[1:]])
