from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcpar.checkpoint import read_extra
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.preemption import Preemption
from hpcpar.data import Sampler
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.training import Config, Outcome, Preempted, parse, parse_stages, runs
from hpcpar.training.metrics import records_of
from hpcpar.training.run_directory import place_with
from tests.training.conftest import RUN
from tests.training.runs import course, deviations, require_same_on_all

# As Llama 3 405B: the batch grows, then sequences become longer and are shared (cp).
STAGES = """
[mesh]
pp = 2
dp = 2
[[stage]]
until = 2
[[stage]]
until = 5
train.global_batch = 8
[[stage]]
train.global_batch = 4
train.sequence = 64
mesh = { dp = 1, cp = 2 }
"""
BASE = (
    RUN.replace("steps = 8", "steps = 7")
    .replace("global_batch = 5", "global_batch = 4")
    .replace("microbatch = 2", "microbatch = 1")
    .replace("layers = 1", "layers = 2")
    .replace("heads = 2\nkv_heads = 1", "heads = 4\nkv_heads = 2")
)


def staged(
    directory: Path, *overrides: str, text: str = BASE + STAGES, name: str = "run"
) -> tuple[Config, ...]:
    documents = directory / "text"
    documents.mkdir(exist_ok=True)
    for number in range(12):
        (documents / f"{number}.txt").write_text(f"document {number}: " + "the cat sat. " * (20 + number))
    places = (f"data.paths={documents}", f"data.cache={directory / 'cache'}")
    return parse_stages(
        text, source="run.toml", overrides=[*places, f"output.directory={directory / name}", *overrides]
    )


def train_all(configs: tuple[Config, ...], size: int, *, resume: bool = False, asked_at: int = -1) -> Any:
    """The outcomes of all stages on each rank; with `asked_at` a stop is asked for after that many steps."""

    def of_rank(comm: Communicator) -> list[Outcome | Preempted]:
        outcomes: list[Outcome | Preempted] = []
        with Preemption(comm, ()) as preemption:
            stages = runs(configs, comm, resume=resume, preemption=preemption)
            while (run := next(stages, None)) is not None:
                if run.first_step == asked_at:
                    preemption.request()
                outcomes.append(run.train())
                del run
                if isinstance(outcomes[-1], Preempted):
                    break
        return outcomes

    return run_loopback(size, of_rank)


def test_each_stage_is_the_run_that_ends_there_gone_on_from_bit_for_bit(tmp_path: Path) -> None:
    outcomes = train_all(staged(tmp_path), 4)
    assert [each.steps for each in outcomes[0]] == [2, 5, 7]
    require_same_on_all([each[-1] for each in outcomes])
    for outcome in outcomes[0]:  # each stage's bytes are its own
        assert set(deviations(outcome).values()) == {0}
        assert outcome.memory.worst.unexplained_nbytes == 0
    # By hand: three runs, the last two of which resume.
    configs = staged(tmp_path, name="hand")
    for number, config in enumerate(configs):
        train_all((config,), 4, resume=number > 0)
    assert course(configs[0]) == course(staged(tmp_path)[0])


def test_the_stages_of_many_ranks_are_those_of_one(tmp_path: Path) -> None:
    train_all(staged(tmp_path, "mesh.tp=2"), 8)
    alone = staged(tmp_path, "mesh.pp=1", "mesh.tp=1", "mesh.dp=1", "mesh.cp=1", name="alone")
    train_all(alone, 1)
    assert course(staged(tmp_path)[0]) == pytest.approx(course(alone[0]), abs=1e-10)


def test_a_run_that_was_stopped_in_its_second_stage_goes_on_there(tmp_path: Path) -> None:
    whole, parts = staged(tmp_path), staged(tmp_path, name="parts")
    train_all(whole, 4)
    stopped = train_all(parts, 4, asked_at=2)
    assert isinstance(stopped[0][-1], Preempted)
    assert stopped[0][-1].steps == 4
    outcomes = train_all(parts, 4, resume=True)
    assert [(each.first_step, each.steps) for each in outcomes[0]] == [(4, 5), (5, 7)]
    assert course(parts[0]) == course(whole[0])


def test_behind_a_damaged_checkpoint_the_stage_of_the_one_before_goes_on(tmp_path: Path) -> None:
    whole, parts = staged(tmp_path), staged(tmp_path, name="parts")
    train_all(whole, 4)
    train_all(parts[:2], 4)
    for piece in (parts[0].output.directory / "checkpoints" / "step-00000005").glob("*.safetensors"):
        piece.write_bytes(piece.read_bytes()[:-1])
    outcomes = train_all(parts, 4, resume=True)
    assert [(each.first_step, each.steps) for each in outcomes[0]] == [(2, 5), (5, 7)]
    assert set(deviations(outcomes[0][0]).values()) == {0}
    assert course(parts[0]) == course(whole[0])


def test_a_change_of_layout_keeps_every_bit_of_parameters_and_optimizer_state(tmp_path: Path) -> None:
    configs = staged(tmp_path)
    train_all(configs[:2], 4)

    def saved_again(comm: Communicator) -> None:
        run = next(runs(configs, comm, resume=True))
        assert run.first_step == 5
        run.directory.checkpoints = tmp_path / "again" / "checkpoints"
        run.save(5)

    run_loopback(4, saved_again)

    def state_of(name: str) -> dict[str, Any]:
        alone = staged(tmp_path, "mesh.pp=1", "mesh.tp=1", "mesh.dp=1", "mesh.cp=1", name=name)
        run = next(runs(alone, Communicator.alone(), resume=True))
        assert run.first_step == 5
        moments = run.optimizer.state_dict()["state"]
        return run.model.state_dict() | {
            f"{key} {name}": value for key, state in moments.items() for name, value in state.items()
        }

    before, after = state_of("run"), state_of("again")
    assert before.keys() == after.keys()
    assert len(before) > 60
    assert all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)


def test_stages_share_their_text_without_a_token_twice(tmp_path: Path) -> None:
    configs = staged(tmp_path)
    train_all(configs, 4)
    tokens = [(c.train.sequence, c.train.global_batch) for c in configs]
    assert tokens == [(16, 4), (16, 8), (64, 4)]
    _, extra = read_extra(configs[0].output.directory / "checkpoints")
    # 2 steps of 4 windows and 3 of 8 are 32 windows of 16 = 8 of 64, and 2 steps of 4 are 8 more.
    assert extra["data"] == {"epoch": 0, "place": 16, "seed": 0, "block": 64}
    records = records_of(configs[0].output.directory / "metrics.jsonl")
    assert [each["tokens"] for each in records if "loss" in each] == [64, 128, 256, 384, 512, 768, 1024]


def test_windows_of_any_sequence_visit_the_same_blocks() -> None:
    short = Sampler(1025, 16, 8, seed=3, block=64)
    long = Sampler(1025, 64, 2, seed=3, block=64)
    for step in range(short.steps_per_epoch):
        places = [window * 16 + offset for window in short.batch(step) for offset in range(16)]
        assert places == [window * 64 + offset for window in long.batch(step) for offset in range(64)]
    assert sorted(window for step in range(8) for window in short.batch(step)) == list(range(64))
    assert place_with(64, 3, 16) == (1, 16)
    assert place_with(16, 3, 64) == (12, 0)


def test_a_later_stage_that_cannot_work_is_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"^stage 3: .*ep=3"):
        train_all(staged(tmp_path, "stage.3.mesh.ep=3"), 4)
    assert not (tmp_path / "run").exists()


def test_a_stage_of_another_number_of_ranks_is_for_another_job(tmp_path: Path) -> None:
    whole, parts = staged(tmp_path), staged(tmp_path, "stage.1.mesh.dp=1", name="parts")
    train_all(whole, 4)
    assert [each.steps for each in train_all(parts, 2)[0]] == [2]
    assert [each.steps for each in train_all(parts, 4, resume=True)[0]] == [5, 7]
    assert course(parts[0]) == pytest.approx(course(whole[0]), abs=1e-10)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["stage.2.until=2"], "stage 2 ends at step 2, and the one before it at 2"),
        (["stage.3.until=6"], "the last stage ends at step 6, and train.steps = 7"),
        (["train.until=3"], "leave train.until out"),
        (["stage.2.model.layers=4"], "stage 2 changes model.layers, and all stages train one model"),
        (["stage.2.optimizer.name=sgd"], "stage 2 changes optimizer.name, from 'adamw' to 'sgd'"),
        (["stage.3.train.sequence=40"], "sequences of 16, 40 tokens"),
        (["stage.4.train.sequence=64"], "has 3 stages, numbered from 1"),
        (
            ["stage.2.train.sequense=64"],
            "stage 2: there is no key train.sequense; did you mean",
        ),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(
    overrides: list[str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        staged(tmp_path, *overrides)


def test_a_stage_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stage 1 has no `until`"):
        staged(tmp_path, text=BASE + "[[stage]]\n[[stage]]\n")


def test_a_file_without_stages_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has stages: give it to `hpcpar train`, or to parse_stages"):
        parse(BASE + STAGES, source="run.toml")
    (config,) = staged(tmp_path, text=BASE)
    assert config.train.last_step == 7
    assert config.data.block is None
