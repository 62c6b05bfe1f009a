"""The examples, and the benchmark that runs one of them, in sizes that take seconds."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpcpar.comm import Communicator
from hpcpar.pipeline_schedules.timetable import read_timetable
from tests import command

pytest.importorskip("mpi4py")

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples" / "fsdp_tp.py")
TINY = ("--hidden", "64", "--sequence", "32", "--n-layers", "2", "--steps", "2")

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


def require(enough: bool) -> None:
    if not enough:
        pytest.skip("one number of ranks is enough")


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


Printed = Callable[..., str]
LOSS = r"loss ([\d.]+)"


def found_in(text: str, pattern: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run an example in this process, which is one of the job's ranks; what it prints."""

    def run(name: str, *words: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", [name, *map(str, words)])
            capsys.readouterr()
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, here: Printed) -> Printed:
    """Run an example in this process as the only rank; what it prints."""

    def run(name: str, *words: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("hpcpar.init", lambda **_: Communicator.alone(), raising=False)
            return here(name, *words)

    return run


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_a_sequence_beyond_the_limit_trains_where_four_ranks_share_it(run_ranks: RunRanks) -> None:
    # A rank with the whole sequence needs 270 MiB, one with a quarter of it 147 MiB.
    example = str(ROOT / "examples" / "long_context.py")
    alone = run_ranks(1, example, "--steps", "1")
    assert alone.returncode != 0
    assert "--sequence=4096 on --cp=1 ranks needs more than --memory-limit-gib=0.2" in alone.stderr
    shared = run_ranks(4, example, "--steps", "1", "--cp", "4")
    assert shared.returncode == 0, shared.stderr
    assert len(found_in(shared.stdout, LOSS)) == 1


@pytest.mark.mpi
def test_a_sequence_that_two_ranks_share_teaches_what_it_does_on_one(
    world: Communicator, here: Printed, alone: Printed
) -> None:
    require(world.size == 2)
    words = ("long_context", "--sequence", 512, "--steps", 3, "--memory-limit-gib", 0)
    shared = found_in(here(*words, "--cp", 2), LOSS)
    if world.rank == 0:
        whole = found_in(alone(*words), LOSS)
        assert len(whole) == 3
        assert shared == pytest.approx(whole, abs=2e-4)  # float32, printed with four digits


@pytest.mark.mpi
def test_experts_that_two_ranks_divide_learn_what_those_of_each_rank_do(
    world: Communicator, here: Printed
) -> None:
    require(world.size == 2)
    words = ("mixture", "--steps", 4, "--experts", 5, "--ep")
    whole, divided = (found_in(here(*words, ep), LOSS) for ep in (1, 2))
    if world.rank == 0:
        assert len(whole) == 4
        assert divided == pytest.approx(whole, abs=2e-4)  # float32, printed with four digits


@pytest.mark.mpi
def test_a_dataset_of_ones_own_is_gone_on_with_in_an_epoch_by_other_ranks(
    world: Communicator, here: Printed, alone: Printed, tmp_path: Path
) -> None:
    require(world.size == 2)
    options = ("--epochs", 2, "--directory", world.broadcast_object(tmp_path / "saved"))
    first = found_in(here("own_dataset", *options, "--until", 5), LOSS)
    if world.rank == 0:
        rest = found_in(alone("own_dataset", *options), LOSS)
        assert (len(first), len(rest)) == (5, 2 * 16 - 5)
        again = ("--epochs", 2, "--workers", 0, "--directory", tmp_path / "whole")
        whole = found_in(alone("own_dataset", *again), LOSS)
        assert first + rest == pytest.approx(whole, abs=5e-6)  # float32, printed with six digits


@pytest.mark.mpi
def test_digits_are_recognised_alike_by_any_ranks_and_stages_of_zero(
    world: Communicator, here: Printed, alone: Printed, tmp_path: Path
) -> None:
    require(world.size == 2)
    pytest.importorskip("sklearn")
    options = ("--batch", 64, "--directory", world.broadcast_object(tmp_path / "saved"))
    first = here("vision_digits", *options, "--epochs", 1, "--zero-stage", 2)
    if world.rank:
        return
    gone_on = alone("vision_digits", *options, "--epochs", 2, "--zero-stage", 3)
    whole = alone("vision_digits", "--batch", 64, "--epochs", 2, "--directory", tmp_path / "whole")
    for pattern, tolerance in ((LOSS, 2e-5), (r"accuracy ([\d.]+)", 3e-3)):  # float32; an image of 360
        together = found_in(first, pattern) + found_in(gone_on, pattern)
        assert len(together) == 2
        assert together == pytest.approx(found_in(whole, pattern), abs=tolerance)
    assert found_in(whole, r"accuracy ([\d.]+)")[1] > 0.9


@pytest.mark.long
def test_a_model_of_transformers_is_tuned_alike_by_two_ranks_and_from_what_they_saved(
    run_ranks: RunRanks, alone: Printed, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    saved = tmp_path / "saved"
    options = ("--steps", "3", "--batch", "9", "--zero-stage", "1")
    done = run_ranks(2, str(ROOT / "examples" / "finetune_transformers.py"), *options, "--output", str(saved))
    assert done.returncode == 0, done.stderr
    whole = found_in(alone("finetune_transformers", *options, "--output", tmp_path / "whole"), LOSS)
    assert len(whole) == 3
    assert found_in(done.stdout, LOSS) == pytest.approx(whole, abs=2e-5)  # float32, AdamW
    once = ("finetune_transformers", "--steps", "1", "--output", tmp_path / "again", "--model")
    again = [found_in(alone(*once, directory), LOSS) for directory in (saved, tmp_path / "whole")]
    assert again[0] == pytest.approx(again[1], abs=2e-5)
    assert again[0][0] < whole[0]


def test_no_steps_are_refused_before_the_job_starts(
    here: Printed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpcpar.init", None, raising=False)
    with pytest.raises(SystemExit, match="2"):
        here("fsdp_tp", *TINY, "--steps", "0")
    assert "error: --steps 0: it takes at least 1" in capsys.readouterr().err


@pytest.mark.mpi
def test_a_model_of_ones_own_is_the_same_in_any_pipeline(
    world: Communicator, here: Printed, alone: Printed, tmp_path: Path
) -> None:
    require(world.size == 2)
    words = ("pipeline", "--steps", 5, "--batch", 32, "--microbatches", 4)
    measured = tmp_path / "measured.json"
    divided = here(*words, "--schedule", "zb-v", "--record", measured)
    if world.rank == 0:
        whole = alone(*words)
        for printed in (divided, whole):
            assert "of the last step idle, of which the schedule says" in printed
        assert len(found_in(whole, LOSS)) == 1
        assert found_in(divided, LOSS) == found_in(whole, LOSS)
        assert read_timetable(measured).rows[1]


@pytest.mark.mpi
def test_a_llama_in_a_loop_of_ones_own_learns_the_same_on_any_mesh(
    world: Communicator, here: Printed, alone: Printed
) -> None:
    meshes = {2: ("--pp", 2, "--schedule", "zb-v"), 4: ("--tp", 2, "--zero-stage", 3)}
    require(world.size in meshes)
    divided = found_in(here("parallel_llama", "--steps", 2, *meshes[world.size]), LOSS)
    if world.rank == 0:
        whole = found_in(alone("parallel_llama", "--steps", 2), LOSS)
        assert len(whole) == 2
        assert divided == pytest.approx(whole, abs=2e-4)  # float32, printed with four digits


@pytest.mark.long
def test_the_degrees_are_run_in_turn_and_drawn(tmp_path: Path) -> None:
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "degrees.png"
    words = ["--ranks", "2", "--degrees", "1", "2", "--rounds", "1", "--json", str(lines)]
    program = ROOT / "benchmarks" / "tensor_parallel_degree.py"
    options = (*words, "--output", str(picture), "--", *TINY)
    done = command.run(sys.executable, program, *options, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(each["tp"], each["dp"], len(each["step_s"])) for each in records] == [(1, 2, 2), (2, 1, 2)]
    # Of random tokens: that of knowing nothing, ln 256.
    assert all(5.4 < each["losses"][0] < 5.8 for each in records)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "  1    2  " in done.stdout


@pytest.fixture
def environment() -> Iterator[None]:
    """Put back what a library's start-up changes of this process's environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def network_of(name: str) -> nn.Sequential:
    """The model of a program of torch.distributed, on one rank."""
    if name == "torch_pipeline":
        hidden = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)]
        return nn.Sequential(*hidden, nn.Linear(32, 1))
    width = 96 if name == "torch_tensor_parallel" else 64
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 1))


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["torch_fsdp2", "torch_tensor_parallel", "torch_pipeline", "ddp_by_hpcpar"])
def test_a_program_of_torch_distributed_ends_with_the_loss_of_plain_torch(
    world: Communicator, here: Printed, environment: None, name: str
) -> None:
    require(world.size == 2)
    found = world.allgather_object(found_in(here(name), "last " + LOSS))
    torch.manual_seed(0)
    inputs = torch.randn(96, 32)
    model = network_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # One rank tells it. Some thirty roundings of a loss around 0.3.
    assert [loss for each in found for loss in each] == pytest.approx([loss.item()], rel=0, abs=1e-6)


# Not by importing it, which would look for TensorFlow.
needs_keras = pytest.mark.skipif(
    not (find_spec("keras") and find_spec("sklearn")), reason="needs Keras and scikit-learn"
)


@pytest.fixture
def keras_alone(alone: Printed, environment: None) -> Iterator[Printed]:
    """Run an example of Keras in this process as the only rank; later models count their names anew."""
    import hpcpar.horovod.keras as hvd  # isort: skip  before keras, for which it chooses torch
    import keras

    hvd.shutdown()
    yield alone
    hvd.shutdown()
    keras.utils.clear_session()


@needs_keras
@pytest.mark.mpi
@pytest.mark.parametrize("example", ["keras_digits", "keras_two_inputs"])
def test_a_keras_example_finds_the_same_losses_on_two_ranks_and_on_one(
    world: Communicator, here: Printed, request: pytest.FixtureRequest, example: str
) -> None:
    require(world.size == 2)
    divided = here(example, "--epochs", 2)
    alone = request.getfixturevalue("keras_alone")
    if world.rank == 0:
        assert "trained on 2 ranks" in divided
        whole = found_in(alone(example, "--epochs", 2), LOSS)
        # Rounding differs by the order of sums, and 40 steps with momentum make more of it.
        assert found_in(divided, LOSS) == pytest.approx(whole, abs=5e-5)
        assert whole[1] < whole[0]


@needs_keras
def test_the_keras_example_runs_by_horovods_name(keras_alone: Printed, tmp_path: Path) -> None:
    program = (ROOT / "examples" / "keras_digits.py").read_text()
    assert program.count("import hpcpar.horovod.keras as hvd") == 1
    script = tmp_path / "digits.py"
    script.write_text(program.replace("import hpcpar.horovod.keras as hvd", "import horovod.keras as hvd"))
    run = (sys.executable, "-m", "hpcpar", "run", "-n", "2", "--as-horovod")
    done = command.run(*run, script, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    losses = found_in(done.stdout, LOSS)
    assert len(losses) == 1
    assert losses == pytest.approx(found_in(keras_alone("keras_digits", "--epochs", 1), LOSS), abs=5e-5)
