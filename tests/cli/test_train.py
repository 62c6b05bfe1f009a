from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import hpcpar
from hpcpar.cli.train import CANNOT_WORK, FAILED, train
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.preemption import INTERRUPT_SAME_WITHIN_S
from hpcpar.errors import MismatchError, OperationError, ScheduleError
from hpcpar.launch.signals import SIGNALS
from hpcpar.training import Run, parse, run_directory, trainer
from hpcpar.training.metrics import Metrics, records_of
from tests.command import run, until

RUN = """
[model]
hidden_size = 8
layers = 1
heads = 2
kv_heads = 1
ffn_size = 16
[data]
held_out = 0.3
[train]
steps = 2
sequence = 8
global_batch = 2
threads = 1
held_out_batches = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(10):
        (text / f"{number}.txt").write_text(f"document {number} " * 20)
    path = tmp_path / "run.toml"
    places = f'[data]\npaths = ["{text}"]\ncache = "{tmp_path / "cache"}"\nheld_out = 0.3\n'
    output = f'[output]\ndirectory = "{tmp_path / "run"}"\n'
    path.write_text(RUN.replace("[data]\nheld_out = 0.3\n", places) + output)
    return path


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before() -> Iterator[None]:
    """The command ignores them once its run is over: programs that are started later would do so, too."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """The command on one rank without MPI."""
    monkeypatch.setattr(hpcpar, "init", lambda **_: Communicator.alone(), raising=False)
    return CliRunner().invoke(train, list(arguments), standalone_mode=False, catch_exceptions=False)


def test_a_file_and_overrides_become_a_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(config), "train.steps=3")
    assert result.return_value == 0
    assert "held-out loss" in result.output
    records = records_of(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [0, 1, 2]


def test_resume_goes_on_from_the_checkpoint(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, str(config))
    result = call(monkeypatch, str(config), "train.steps=3", "--resume")
    assert result.return_value == 0
    assert "resuming after step 2" in result.output


def test_a_file_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(tmp_path / "none.toml"))
    assert result.return_value == CANNOT_WORK
    assert result.stderr.startswith(f"hpcpar train: cannot read the configuration {tmp_path / 'none.toml'}")
    assert len(result.stderr.splitlines()) == 1


def test_text_that_is_not_there_is_said_by_its_path(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(config), f"data.paths={tmp_path / 'gone'}")
    assert result.return_value == CANNOT_WORK
    assert str(tmp_path / "gone") in result.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("output.directory=/proc/x", "output.directory = /proc/x cannot be made: "),
        ("data.cache=/proc/x", "/proc/x"),
        ("optimizer.offload=/proc/x", "offload='/proc/x' cannot be written to"),
        ("optimizer.algorithm=nonsense", "optimizer.algorithm = 'nonsense': for allreduce there are "),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    result = call(monkeypatch, str(config), override)
    assert result.return_value == CANNOT_WORK
    assert result.stderr.startswith("hpcpar train: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", [MismatchError, OperationError, ScheduleError])
def test_errors_that_all_ranks_meet_while_a_run_is_built_are_said_in_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kind("it makes no sense")

    monkeypatch.setattr(trainer, "plain_optimizer", refuse)
    result = call(monkeypatch, str(config))
    assert result.return_value == CANNOT_WORK
    assert result.stderr == "hpcpar train: it makes no sense\n"


def test_training_that_diverges_is_said_in_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call(
        monkeypatch, str(config), "optimizer.name=sgd", "optimizer.learning_rate=1e30", "train.steps=20"
    )
    assert result.return_value == FAILED
    assert result.stderr.startswith("hpcpar train: step ")
    assert "NaN or infinity came from rank 0; that was number 10 of such steps in a row" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_checkpoint_that_cannot_be_saved_is_said_in_one_line(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_directory, "save", full)
    result = call(monkeypatch, str(config))
    assert result.return_value == FAILED
    assert result.stderr.startswith(
        f"hpcpar train: the checkpoint of step 2 cannot be saved in {tmp_path / 'run' / 'checkpoints'}: "
        "[Errno 28] No space left on device; "
    )
    assert len(result.stderr.splitlines()) == 1


def test_a_disk_that_is_full_of_other_things_is_said_in_one_line_with_the_file(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            if not self.closed:
                super().close()
                self.flush()

    init = Metrics.__init__

    def on_a_full_disk(self: Metrics, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(Metrics, "__init__", on_a_full_disk)
    result = call(monkeypatch, str(config))
    assert result.return_value == FAILED
    path = tmp_path / "run" / "metrics.jsonl"
    assert result.stderr == f"hpcpar train: [Errno 28] No space left on device: '{path}'\n"


def test_a_misspelt_key_ends_a_real_process_with_status_2_and_without_a_traceback(config: Path) -> None:
    done = run(sys.executable, "-m", "hpcpar", "train", config, "train.stpes=3")
    assert done.returncode == CANNOT_WORK
    assert done.stderr == (
        "hpcpar train: override 'train.stpes=3': there is no key train.stpes; did you mean train.steps?\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.toml", "--steps", "100"], "no option --steps; a key is set without dashes: train.steps=…"),
        (["run.toml", "--train.steps=3"], "set without dashes: train.steps=…"),
        (["run.toml", "--lr=1"], "set without dashes: optimizer.learning_rate=…"),
        (["run.toml", "--resum"], "--resume"),
    ],
)
def test_a_key_that_is_written_as_an_option_is_shown_as_it_is_set(words: list[str], said: str) -> None:
    result = CliRunner().invoke(train, words)
    assert result.exit_code == CANNOT_WORK
    assert said in result.stderr


@pytest.mark.parametrize("when", ["while torch is imported", "in the run"])
def test_a_signal_ends_a_real_process_with_status_75_and_a_restarted_job_goes_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    words = (str(config), "train.steps=100000", "output.log_every=1")
    command = [sys.executable, "-m", "hpcpar", "train", *words]
    metrics = tmp_path / "run" / "metrics.jsonl"
    ended = [subprocess.PIPE, subprocess.STDOUT]
    with subprocess.Popen(command, stdout=ended[0], stderr=ended[1], text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        until(lambda: metrics.exists() if when == "in the run" else "libtorch" in maps.read_text())
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "asked to stop: " in said
    done = len([record for record in records_of(metrics) if "loss" in record])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = call(monkeypatch, *words, f"train.steps={done + 1}")
    assert again.return_value == 0, again.output
    assert "Slurm started this job again (SLURM_RESTART_COUNT=1): as with --resume" in again.stdout
    assert f"resuming after step {done} from" in again.stdout


CRASHES = """
import os, signal, sys
from hpcpar.cli.train import train
from hpcpar.training import Run
step = Run._step
def crash(run, number):
    if number == 5 and run.comm.rank == 1 and "HPCPAR_RESTART_COUNT" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run, number)
if "crashes" in sys.argv:
    Run._step = crash
sys.exit(train([word for word in sys.argv[1:] if word != "crashes"], standalone_mode=False))
"""


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_costs_a_restart_and_no_bit(config: Path, tmp_path: Path) -> None:
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    steps = ("train.steps=8", "output.checkpoint_every=2", "output.log_every=1", "optimizer.zero_stage=1")

    done = run(
        *(sys.executable, "-m", "hpcpar", "run", "-n", "2", "--restarts", "2"),
        *(script, config, *steps, "crashes"),
        timeout_s=250,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "rank 1 (pid" in said
    assert "hpcpar run: restart 1 of 2 in 1 s" in said
    assert "hpcpar run started this job again (HPCPAR_RESTART_COUNT=1): as with --resume" in said
    assert "resuming after step 4" in said
    directory = tmp_path / "whole"
    whole = parse(config.read_text(), source="run.toml", overrides=[*steps, f"output.directory={directory}"])
    run_loopback(2, lambda comm: Run(whole, comm).train())
    broken, unbroken = (
        [each.get("loss", each.get("held_out_loss")) for each in records_of(path / "metrics.jsonl")]
        for path in (tmp_path / "run", directory)
    )
    assert len(unbroken) > 8
    assert broken == unbroken


def interruptible() -> None:
    """In a child: of a process in the background Ctrl-C is ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_saves_a_checkpoint_and_ends_a_real_process_with_status_130_and_one_line(
    config: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hpcpar", "train", str(config), "output.log_every=1"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    ended = [subprocess.PIPE, subprocess.PIPE]
    with subprocess.Popen(
        [*command, "train.steps=100000", "train.preemptible=false"],
        stdout=ended[0],
        stderr=ended[1],
        text=True,
        preexec_fn=interruptible,
    ) as process:
        until(lambda: metrics.exists() and metrics.stat().st_size)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=60)
    assert process.returncode == 130, complained
    assert "Traceback" not in complained
    done = len([record for record in records_of(metrics) if "loss" in record])
    saved = tmp_path / "run" / "checkpoints" / f"step-{done:08d}"
    assert (saved / "manifest.json").exists()
    told = said.replace("\n", " ")
    assert f"asked to stop: {done} of 100000 steps are done and saved in" in told
    assert "--resume goes on from there" in told


def test_a_second_ctrl_c_ends_at_once_and_one_before_the_first_step_says_that_nothing_is_there(
    config: Path, tmp_path: Path
) -> None:
    # A step that does not come to its end, and data that are not ready for long.
    slow = (
        "import time, signal; from hpcpar.training import trainer; import hpcpar.cli as cli; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "wait = lambda *a, **k: (print('here', flush=True), time.sleep(100)); "
    )
    nothing_yet = "Ctrl-C before the first step: nothing is there to be saved yet"
    for patch, presses, words in (
        ("trainer.train_step = wait; ", 2, "SIGINT, after it had been asked to stop already"),
        ("trainer.prepare_data = wait; ", 1, nothing_yet),
    ):
        program = f"{slow}{patch}cli.main(['train', {str(config)!r}])"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            while process.stdout.readline() != "here\n":
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            if presses == 2:
                while "SIGINT: the job will stop after this step" not in process.stderr.readline():
                    assert process.poll() is None
                time.sleep(2 * INTERRUPT_SAME_WITHIN_S)
                process.send_signal(signal.SIGINT)
            complained = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert words in complained
        assert "Traceback" not in complained
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_run_that_is_not_preemptible_ends_of_the_signal(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcpar", "train", str(config), "train.steps=100000"]
    with subprocess.Popen([*command, "train.preemptible=false"], stdout=subprocess.DEVNULL) as process:
        until((tmp_path / "run" / "metrics.jsonl").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_recipes_are_listed_and_their_account_is_printed_without_starting_anything(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    def starts(**_: object) -> Communicator:
        raise AssertionError("a dry run started MPI")

    monkeypatch.setattr(hpcpar, "init", starts, raising=False)

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(train, list(arguments), standalone_mode=False, catch_exceptions=False)
        assert done.return_value == 0, done.output
        return done.output

    assert "yi-34b        Yi 34B: ZeRO-1" in said("--recipe")
    full = said("--recipe", "yi-34b", "--full", "--dry-run", "train.global_batch=2048")
    assert "256 ranks on 32 nodes: pp=2 x dp=32 x tp=4, ZeRO-1" in full
    assert "a step: 2,048 sequences of 4,096 tokens" in full
    assert "8 ranks: pp=2 x dp=2 x tp=2" in said("--dry-run", "--recipe", "yi-34b")
    words = ("mesh.dp=1", "train.microbatch=1", "--dry-run", "--machine", "two-cores")
    assert "a step: 2 sequences of 8 tokens" in said(str(config), *words)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Missing argument 'CONFIG': a TOML file, or --recipe NAME"),
        (["run.toml", "--full"], "name one: --recipe NAME --full"),
    ],
)
def test_a_command_without_a_run_is_a_usage_error(arguments: list[str], reason: str) -> None:
    done = CliRunner().invoke(train, arguments)
    assert done.exit_code == 2
    assert reason in done.output


def test_a_recipe_that_is_not_there_and_a_dry_run_that_cannot_work_end_with_status_2() -> None:
    for arguments, reason in (
        (["--recipe", "yi34b", "--dry-run"], "did you mean 'yi-34b'?"),
        (["--recipe", "yi-34b", "--dry-run", "mesh.dp=-1"], "give each degree, as in mesh.dp=8"),
        (["--recipe", "yi-34b", "--dry-run", "--machine", "h100"], "no machine is called 'h100'"),
    ):
        done = CliRunner().invoke(train, arguments, standalone_mode=False)
        assert (done.return_value, reason in done.output) == (CANNOT_WORK, True), done.output


def test_a_recipe_trains_and_a_staged_file_goes_through_its_stages(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(config.read_text() + "\n[[stage]]\nuntil = 1\n[[stage]]\ntrain.global_batch = 4\n")
    done = call(monkeypatch, str(config))
    assert done.return_value == 0
    assert "stage 2 of 2: until step 2" in done.output
    losses = [each for each in records_of(tmp_path / "run" / "metrics.jsonl") if "loss" in each]
    assert [each["tokens"] for each in losses] == [16, 48]
    words = ["mesh.dp=1", "mesh.ep=1", "train.steps=1", "train.sequence=8", "train.global_batch=1"]
    places = [
        f"output.directory={tmp_path / 'recipe'}",
        f"data.paths={tmp_path / 'text'}",
        "data.held_out=0.3",
    ]
    cache = f"data.cache={tmp_path / 'cache'}"
    assert call(monkeypatch, "--recipe", "yi-lightning", *words, *places, cache).return_value == 0


def test_a_signal_in_a_stage_ends_the_job_before_the_next_one_with_status_75(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = config.read_text().replace("steps = 2", "steps = 4")
    config.write_text(text + "\n[[stage]]\nuntil = 2\n[[stage]]\ntrain.global_batch = 4\n")
    train_step = trainer.train_step

    def signalled(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        until(lambda: "SIGUSR1" in caplog.text)  # heard by a thread of its own
        monkeypatch.setattr(trainer, "train_step", train_step)
        return train_step(*arguments, **options)

    monkeypatch.setattr(trainer, "train_step", signalled)
    assert call(monkeypatch, str(config)).return_value == 75
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000002"
    ]
    done = call(monkeypatch, str(config), "--resume")
    assert done.return_value == 0
    assert "resuming after step 2" in done.output
    assert "stage 2 of 2: until step 4" in done.output


def test_the_configuration_is_shown_and_nothing_is_started(config: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(train, [str(config), "train.steps=3", "--show"], standalone_mode=False)
    assert result.return_value == 0
    assert "steps = 3  # command line" in result.output
    assert f"sequence = 8  # {config}" in result.output
    assert not (tmp_path / "run").exists()


def test_all_keys_are_listed_without_a_file() -> None:
    result = CliRunner().invoke(train, ["--keys", "mesh"], standalone_mode=False)
    assert result.return_value == 0
    assert "ranks that hold different layers" in result.output
    assert CliRunner().invoke(train, ["--keys"], standalone_mode=False).output.count("\n[") == 12
