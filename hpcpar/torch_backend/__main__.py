"""`python -m hpcpar.torch_backend script.py …`: run a torch.distributed program, as it is, over hpcpar.

    mpiexec -n 2 python -m hpcpar.torch_backend train.py --lr 0.1     (also -m module …, -c code …)
    hpcpar run -n 2 --as-torch train.py --lr 0.1                      the same

Whatever backend the program names, or none, it gets hpcpar's, and torchrun's variables are set.
"""

from __future__ import annotations

import sys

from hpcpar.launch.program import run_program
from hpcpar.torch_backend import as_torch

if __name__ == "__main__":
    run_program(sys.argv[1:], "hpcpar.torch_backend", __doc__, as_torch.install)
