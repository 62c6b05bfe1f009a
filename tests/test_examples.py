"""The examples, and the benchmark that runs one of them, in sizes that take seconds."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcpar.comm import Communicator
from hpcpar.pipeline_schedules.timetable import read_timetable

pytest.importorskip("mpi4py")

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples" / "fsdp_tp.py")
TINY = ("--hidden", "64", "--sequence", "32", "--n-layers", "2", "--steps", "2")

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_a_size_beyond_the_limit_fails_with_advice_and_fits_with_tensor_parallelism(
    run_ranks: RunRanks,
) -> None:
    # What backward needs of 8 layers is 87 MiB, and half of it on each of two ranks.
    size = ("--hidden", "128", "--sequence", "1024", "--n-layers", "8", "--steps", "1")
    limited = (*size, "--memory-limit-gib", "0.08")
    alone = run_ranks(2, EXAMPLE, *limited, "--tp", "1")
    assert alone.returncode != 0
    assert "needs more than --memory-limit-gib=0.08" in alone.stderr
    assert "on tp=1; try --tp=2\n" in alone.stderr
    shared = run_ranks(2, EXAMPLE, *limited, "--tp", "2")
    assert shared.returncode == 0, shared.stderr
    for said in (
        "tp=2: 8 layers of 128",
        "step 1  loss",
        "median of steps",
        "tokens/s",
        "rank 1: peak memory",
    ):
        assert said in shared.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_a_sequence_beyond_the_limit_trains_where_four_ranks_share_it(run_ranks: RunRanks) -> None:
    # A rank with the whole sequence needs 270 MiB, one with a quarter of it 147 MiB.
    example = str(ROOT / "examples" / "long_context.py")
    alone = run_ranks(4, example, "--steps", "1")
    assert alone.returncode != 0
    assert "--sequence=4096 on --cp=1 ranks needs more than --memory-limit-gib=0.2" in alone.stderr
    whole = run_ranks(1, example, "--steps", "2", "--memory-limit-gib", "0")
    shared = run_ranks(4, example, "--steps", "2", "--cp", "4")
    told = []
    for done in (whole, shared):
        assert done.returncode == 0, done.stderr
        losses = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        told.append([float(words[-1]) for words in losses])
    assert len(told[0]) == 2
    assert told[1] == pytest.approx(told[0], abs=2e-4)  # float32, printed with four digits


def test_experts_that_two_ranks_divide_learn_what_those_of_each_rank_do(run_ranks: RunRanks) -> None:
    example = str(ROOT / "examples" / "mixture.py")
    told = []
    for ep in ("1", "2"):
        done = run_ranks(2, example, "--steps", "4", "--experts", "5", "--ep", ep)
        assert done.returncode == 0, done.stderr
        told.append(
            [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
        )
    assert len(told[0]) == 4
    assert told[1] == pytest.approx(told[0], abs=2e-4)  # float32, printed with four digits


Alone = Callable[..., str]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Alone:
    """Run an example in this process, which is one rank, in a directory of its own; what it prints."""

    def run(name: str, *words: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("hpcpar.init", Communicator.alone, raising=False)
            patch.setattr("sys.argv", [name, *map(str, words)])
            patch.chdir(tmp_path)
            capsys.readouterr()
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def found_in(text: str, pattern: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


LOSS = r"loss ([\d.]+)"


def test_a_dataset_of_ones_own_is_gone_on_with_in_an_epoch_by_other_ranks(
    run_ranks: RunRanks, alone: Alone, tmp_path: Path
) -> None:
    options = ("--epochs", "2", "--directory", str(tmp_path / "saved"))
    done = run_ranks(2, str(ROOT / "examples" / "own_dataset.py"), *options, "--until", "5")
    assert done.returncode == 0, done.stderr
    first, rest = found_in(done.stdout, LOSS), found_in(alone("own_dataset", *options), LOSS)
    assert (len(first), len(rest)) == (5, 2 * 16 - 5)
    whole = found_in(alone("own_dataset", "--epochs", "2", "--workers", "0", "--directory", "whole"), LOSS)
    assert first + rest == pytest.approx(whole, abs=5e-6)  # float32, printed with six digits


def test_digits_are_recognised_alike_by_any_ranks_and_stages_of_zero(
    run_ranks: RunRanks, alone: Alone, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    options = ("--epochs", "1", "--batch", "64", "--directory", str(tmp_path / "saved"))
    done = run_ranks(2, str(ROOT / "examples" / "vision_digits.py"), *options, "--zero-stage", "2")
    assert done.returncode == 0, done.stderr
    gone_on = alone("vision_digits", *options, "--epochs", "2", "--zero-stage", "3")
    whole = alone("vision_digits", "--batch", "64", "--epochs", "2")
    for pattern, tolerance in ((LOSS, 2e-5), (r"accuracy ([\d.]+)", 3e-3)):  # float32; an image of 360
        together = found_in(done.stdout, pattern) + found_in(gone_on, pattern)
        assert len(together) == 2
        assert together == pytest.approx(found_in(whole, pattern), abs=tolerance)
    assert found_in(whole, r"accuracy ([\d.]+)")[1] > 0.9


@pytest.mark.long
def test_a_model_of_transformers_is_tuned_alike_by_two_ranks_and_from_what_they_saved(
    run_ranks: RunRanks, alone: Alone, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    saved = tmp_path / "saved"
    options = ("--steps", "3", "--batch", "9", "--zero-stage", "1")
    done = run_ranks(2, str(ROOT / "examples" / "finetune_transformers.py"), *options, "--output", str(saved))
    assert done.returncode == 0, done.stderr
    whole = found_in(alone("finetune_transformers", *options, "--output", "whole"), LOSS)
    assert len(whole) == 3
    assert found_in(done.stdout, LOSS) == pytest.approx(whole, abs=2e-5)  # float32, AdamW
    again = [
        found_in(alone("finetune_transformers", "--steps", "1", "--model", directory), LOSS)
        for directory in (saved, "whole")
    ]
    assert again[0] == pytest.approx(again[1], abs=2e-5)
    assert again[0][0] < whole[0]


def test_no_steps_are_refused_before_the_job_starts(run_ranks: RunRanks) -> None:
    done = run_ranks(1, EXAMPLE, *TINY, "--steps", "0")
    assert done.returncode == 2
    assert "error: --steps 0: it takes at least 1" in done.stderr


def test_a_model_of_ones_own_is_the_same_in_any_pipeline(run_ranks: RunRanks, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "pipeline.py")
    told = ("--steps", "5", "--batch", "32", "--microbatches", "4")
    measured = tmp_path / "measured.json"
    ends = []
    for ranks, options in ((1, ()), (2, ("--schedule", "zb-v", "--record", str(measured)))):
        done = run_ranks(ranks, example, *told, *options)
        assert done.returncode == 0, done.stderr
        ends.append([line for line in done.stdout.splitlines() if line.startswith("step   5  loss")])
        assert "of the last step idle, of which the schedule says" in done.stdout
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    assert read_timetable(measured).rows[1]


def test_a_llama_in_a_loop_of_ones_own_learns_the_same_on_any_mesh(run_ranks: RunRanks) -> None:
    example = str(ROOT / "examples" / "parallel_llama.py")
    told = []
    meshes = ((1, ()), (2, ("--pp", "2", "--schedule", "zb-v")), (4, ("--tp", "2", "--zero-stage", "3")))
    for ranks, options in meshes:
        done = run_ranks(ranks, example, "--steps", "3", *options)
        assert done.returncode == 0, done.stderr
        told.append(
            [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
        )
    assert len(told[0]) == 3
    for losses in told[1:]:
        assert losses == pytest.approx(told[0], abs=2e-4)  # float32, printed with four digits


@pytest.mark.long
def test_the_degrees_are_run_in_turn_and_drawn(tmp_path: Path) -> None:
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "degrees.png"
    command = [sys.executable, str(ROOT / "benchmarks" / "tensor_parallel_degree.py"), "--ranks", "2"]
    command += ["--degrees", "1", "2", "--rounds", "1", "--json", str(lines), "--output", str(picture)]
    done = subprocess.run(
        [*command, "--", *TINY], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(each["tp"], each["dp"], len(each["step_s"])) for each in records] == [(1, 2, 2), (2, 1, 2)]
    # Of random tokens: that of knowing nothing, ln 256.
    assert all(5.4 < each["losses"][0] < 5.8 for each in records)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "  1    2  " in done.stdout


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d+  loss ([\d.]+)", done.stdout, re.MULTILINE)]


# Not by importing it, which would look for TensorFlow.
needs_keras = pytest.mark.skipif(
    not (find_spec("keras") and find_spec("sklearn")), reason="needs Keras and scikit-learn"
)


@needs_keras
@pytest.mark.parametrize("example", ["keras_digits", "keras_two_inputs"])
def test_a_keras_example_finds_the_same_losses_on_any_number_of_ranks(
    run_ranks: RunRanks, example: str
) -> None:
    program = str(ROOT / "examples" / f"{example}.py")
    alone, together = (run_ranks(n, program, "--epochs", "2") for n in (1, 2))
    assert "trained on 2 ranks" in together.stdout
    # Rounding differs by the order of sums, and 40 steps with momentum make more of it.
    assert losses_of(together) == pytest.approx(losses_of(alone), abs=5e-5)
    assert losses_of(alone)[1] < losses_of(alone)[0]


@needs_keras
def test_the_keras_example_runs_by_horovods_name_and_by_hpcpar_run(tmp_path: Path) -> None:
    program = (ROOT / "examples" / "keras_digits.py").read_text()
    assert program.count("import hpcpar.horovod.keras as hvd") == 1
    script = tmp_path / "digits.py"
    script.write_text(program.replace("import hpcpar.horovod.keras as hvd", "import horovod.keras as hvd"))
    run = [sys.executable, "-m", "hpcpar", "run", "-n", "2"]
    losses = []
    for words in (["--as-horovod", str(script)], [str(ROOT / "examples" / "keras_digits.py")]):
        command = [*run, *words, "--epochs", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
        losses.append(losses_of(done))
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]
