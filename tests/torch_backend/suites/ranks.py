"""One rank of a job that calls torch's own distributed tests in turn: started by `run.py`.

    ranks.py BACKEND DIRECTORY LIMIT_S TEST ...      (without arguments: print the names of all tests)

torch's class starts processes itself and has them meet over a file; here the ranks are those of the job.
Each rank appends a line to DIRECTORY/outcomes-RANK for each test, and goes on when all have. After a failure
messages may be under way, so the job ends, and `run.py` starts another for the rest.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcpar.launch import torch_variables
from hpcpar.torch_backend import as_torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # a script of its own finds no `tests`


def main(backend: str, directory: Path, limit_s: float, names: list[str]) -> None:
    torch_variables.fill(os.environ)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    suite = prepare(backend, directory)
    log = (directory / f"log-{rank}").open("a")
    for at, name in enumerate(names):
        faulthandler.dump_traceback_later(limit_s, exit=True, file=log)
        outcome = call(suite, name, rank, size, backend, directory / f"store-{name}")
        record(directory, rank, {"test": name, **outcome})
        found = [outcomes_of(directory, other, wanted=at + 1)[at]["outcome"] for other in range(size)]
        faulthandler.cancel_dump_traceback_later()
        if "failed" in found:
            os._exit(0)


NAME_THE_BACKEND = ("test_get_backend", "test_Backend_enum_class")
"""Tests that expect this backend by its name; the others ask whether it does what gloo does."""


def prepare(backend: str, directory: Path) -> Any:
    """Import torch's class as for gloo, which has most tests of CPU tensors."""
    # It is read when torch's class is imported; later on, groups of ranks 1 and 2 ask for 8 ranks or for MPI.
    os.environ.update(BACKEND="gloo", INIT_METHOD=f"file://{directory}/again", TEMP_DIR=str(directory))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    for part in ("barrier", "test_dir", "init_dir"):
        (directory / part).mkdir(exist_ok=True)
    if importlib.util.find_spec("expecttest") is None:
        # torch's test cases derive from it, and none of these compares with a recorded text.
        stand_in: Any = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test as suites

    if backend == "hpcpar":
        as_torch.install()
    os.environ["BACKEND"] = "mpi" if int(os.environ["WORLD_SIZE"]) > 2 else "gloo"

    class Suite(suites.TestDistBackend, suites.DistributedTest._DistTestBase):
        """torch's tests; `TestDistBackend` would start processes in `setUp`, which is not called."""

    return Suite


def call(suite: Any, name: str, rank: int, size: int, backend: str, store: Path) -> dict[str, str]:
    """Call one test; if it is for GPUs, on CPU tensors."""
    from tests.torch_backend.suites.on_cpu import instead_of_gpus

    method = getattr(suite, name)
    why = getattr(method, "__unittest_skip_why__", "") if getattr(method, "__unittest_skip__", False) else ""
    if why and not why.startswith("Only MPI supports"):  # unittest's runner would look at it
        return {"outcome": "skipped", "reason": why}
    outcome = call_in_group(suite, name, rank, size, backend, store)
    if outcome["outcome"] == "skipped" and "CUDA" in outcome["reason"]:
        with instead_of_gpus():
            found = call_in_group(suite, name, rank, size, backend, store.with_name(f"again-{name}"))
        if "only work with GPU modules" in found["reason"]:
            return outcome
        found["reason"] = f"{outcome['reason']}; on CPU tensors: {found['reason']}".removesuffix(": ")
        return found
    return outcome


def call_in_group(suite: Any, name: str, rank: int, size: int, backend: str, store: Path) -> dict[str, str]:
    """Call one test in a new process group."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed import distributed_test

    skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    case = suite(name)
    distributed_test.BACKEND = backend if name in NAME_THE_BACKEND else "gloo"
    case.rank, case.file_name = rank, str(store)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # a test before has left its level
    dist.set_debug_level_from_env()
    try:
        dist.init_process_group(
            backend,
            init_method="env://" if backend == "hpcpar" else f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        common_utils.set_rng_seed()
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        return {"outcome": "skipped", "reason": str(skipped)}
    except SystemExit as ended:
        return {"outcome": "skipped", "reason": skips[int(str(ended.code))]}
    except Exception as error:
        return {"outcome": "failed", "reason": last_line(error), "traceback": traceback.format_exc()}
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()
    return {"outcome": "passed", "reason": ""}


def last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def record(directory: Path, rank: int, line: dict[str, str]) -> None:
    with (directory / f"outcomes-{rank}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def outcomes_of(directory: Path, rank: int, wanted: int = 0) -> list[dict[str, str]]:
    """Lines that a rank has written, as soon as there are as many as wanted."""
    path = directory / f"outcomes-{rank}"
    while True:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if len(lines) >= wanted:
            return [json.loads(line) for line in lines]
        time.sleep(0.002)


def print_names() -> None:
    os.environ["WORLD_SIZE"] = "2"
    with tempfile.TemporaryDirectory() as directory:
        print(*[name for name in dir(prepare("gloo", Path(directory))) if name.startswith("test_")])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print_names()
        sys.exit()
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
