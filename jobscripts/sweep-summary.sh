#!/bin/bash
# The rows of a sweep, best first: run it on the directory that jobscripts/sweep.sh filled, as a dependent job (there)
# or by hand: bash jobscripts/sweep-summary.sh runs/sweep-123
#SBATCH --job-name=hpcpar-sweep-summary
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=00:05:00
#SBATCH --output=%x-%j.out

# --- site: the same in every script (README.md) -------------------------------------------------------
##SBATCH --account=project
##SBATCH --partition=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

directory=${1:?the directory of the sweep, as runs/sweep-123}

python - "$directory" <<'END'
import json
import math
import sys
from pathlib import Path

finished, others = [], []
for task in sorted(Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name)):
    try:
        loss = json.loads((task / "summary.json").read_text())["held_out_loss"]
        finished.append((loss, task.name, (task / "row.txt").read_text().strip()))
    except FileNotFoundError:
        others.append(task.name)
print("held-out loss  task  row")
# What has diverged is NaN, which is neither more nor less than anything: it comes last.
for loss, task, row in sorted(finished, key=lambda one: (math.isnan(one[0]), *one)):
    print(f"{loss:13.4f}  {task:>4}  {row}")
if others:
    sys.exit(f"not finished: tasks {', '.join(others)}")
END
