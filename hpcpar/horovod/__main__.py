"""`python -m hpcpar.horovod script.py …`: run a program written for Horovod, as it is, over hpcpar.

    mpiexec -n 2 python -m hpcpar.horovod train.py --lr 0.1     (also -m module …, -c code …)
    hpcpar run -np 2 --as-horovod train.py --lr 0.1             the same

`import horovod` means ours. Beyond that the program sees what it would see without us.
"""

from __future__ import annotations

import sys

from hpcpar.horovod import alias
from hpcpar.launch.program import run_program

if __name__ == "__main__":
    run_program(sys.argv[1:], "hpcpar.horovod", __doc__, alias.install)
