"""Everything with everything: drawn layouts train the model of one process and send what theory says."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.zero3 import summon_full_parameters
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.models import LlamaStages
from hpcpar.tensor_parallel import own_shard
from hpcpar.training import Config, Outcome, Run
from tests.training.conftest import configs_in
from tests.training.layouts import Drawn, pairwise
from tests.training.runs import MakeConfig, course, deviations

Serial = tuple[dict[str, Tensor], list[float], float]
"""All parameters; losses and norms of all steps; held-out loss."""

Rows = list[tuple[int, bool]]
"""Bytes of a forward of each call, and whether a backward follows."""

OfSerial = Callable[[tuple[str, ...]], Serial]

MODEL = (
    "model.hidden_size=16",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_size=32",
    "train.sequence=16",
    "train.steps=10",
    "train.global_batch=4",
    "train.microbatch=2",
    "train.evaluate_every=10",
    "train.compare_every=5",
    "optimizer.clip_norm=0.2",
    "optimizer.epsilon=1e-4",
)
"""Every gradient is clipped; heads, experts and layers divide among all ranks of the layouts."""

LAYOUTS = list(itertools.islice(pairwise(MODEL, ranks=4, seed=1, leave_out=("precision",)), 40))
"""Of at most four ranks; the first of a draw have most pairs."""


@cache
def more() -> list[Drawn]:
    """Return 300 layouts of up to eight ranks; made when first asked for, as they take a while."""
    draws = (pairwise(MODEL, ranks=8, seed=seed, leave_out=("precision",)) for seed in itertools.count(1))
    return list(itertools.islice(itertools.chain.from_iterable(draws), 300))


HALVES = list(
    itertools.islice(
        pairwise(MODEL, ranks=4, seed=2, leave_out=("precision", "optimizer", "optimizer state")), 6
    )
)
"""Trained in 16 bits."""


def test_forty_layouts_are_drawn_and_have_most_features() -> None:
    assert len({each.options for each in LAYOUTS}) == 40
    drawn = {feature for each in LAYOUTS for feature in each.choice.values()} - {""}
    assert len(drawn) >= 30


def test_the_documentation_shows_the_rules_that_are_kept() -> None:
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "docs/composition.py"], cwd=root, check=True, capture_output=True, text=True
    )
    assert made.stdout == (root / "docs" / "composition.md").read_text("utf-8")


def of_model(options: tuple[str, ...]) -> tuple[str, ...]:
    """Options that change what is computed, and not only where."""
    computed = ("model.", "optimizer.name", "train.global_batch")
    return tuple(sorted(each for each in options if each.startswith(computed)))


@pytest.fixture(scope="session")
def of_serial(tmp_path_factory: pytest.TempPathFactory) -> OfSerial:
    """`of_serial(options)`: the run of one process, once for all that compare with it."""

    @cache
    def trained(options: tuple[str, ...]) -> Serial:
        config = configs_in(tmp_path_factory.mktemp("alone"))(*MODEL, *options)

        def work(comm: Communicator) -> Serial:
            run = Run(config, comm)
            outcome = run.train()
            assert isinstance(outcome, Outcome)
            values = {name: p.detach().clone() for name, p in run.model.named_parameters()}
            return values, course(config), outcome.held_out_loss

        return run_loopback(1, work)[0]

    return trained


def require_serial(
    config: Config, comm: Communicator, whole: Serial, unknown: Collection[None] = ()
) -> Outcome:
    """Train a layout; every parameter, loss, norm and byte is as it must be, on every rank. Collective.

    unknown   [None] where communicators of earlier runs, of which this run's theory says nothing, are counted
    """
    values, losses, held_out = whole
    run = Run(config, comm)
    outcome = run.train()
    assert isinstance(outcome, Outcome)
    run.optimizer.wait_for_parameters()
    tied = run.model.tied_names if isinstance(run.model, LlamaStages) else {}
    with torch.no_grad(), summon_full_parameters(run.model, write_back=False):
        off = {
            name: (own_shard(part, values[tied.get(name, name)]) - part).abs().max().item()
            for name, part in run.model.named_parameters()
        }
    assert max(off.values()) < 1e-10, off
    assert course(config) == pytest.approx(losses, abs=1e-10)
    assert outcome.held_out_loss == pytest.approx(held_out, abs=1e-10)
    found = deviations(outcome)
    assert set(found.values()) <= {0, *unknown}, found
    assert outcome.memory.worst.unexplained_nbytes == 0
    return outcome


@pytest.fixture
def rows_of_experts(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Count what experts' ranks are to send each other, by the experts that tokens chose."""
    found: Rows = []
    mix = ExpertParallel.mix

    def counted(experts: ExpertParallel, hidden: Tensor, *others: Any, **options: Any) -> Tensor:
        out = mix(experts, hidden, *others, **options)
        elsewhere = sum(experts.counts) - sum(experts.counts[own] for own in experts.own)
        there_and_back = 2 * elsewhere * hidden.shape[1] * hidden.itemsize
        found.append((there_and_back, torch.is_grad_enabled()))
        return out

    monkeypatch.setattr(ExpertParallel, "mix", counted)
    return found


def require_right(config_of: MakeConfig, of_serial: OfSerial, drawn: Drawn, rows: Rows) -> None:
    whole = of_serial(of_model(drawn.options))
    config = config_of(*MODEL, *drawn.options)
    outcome, *_ = run_loopback(drawn.ranks, lambda comm: require_serial(config, comm, whole), timeout_s=240)
    exchanged = [line for line in outcome.traffic if line.communicator.split("-")[0] == "ep"]
    passes = 3 if "train.recompute=full" in drawn.options else 2
    expected = sum(nbytes * (passes if is_trained else 1) for nbytes, is_trained in rows)
    assert sum(line.nbytes_sent for line in exchanged if line.collective == "alltoall") == expected


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("drawn", LAYOUTS, ids=str)
def test_a_drawn_layout_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_serial: OfSerial, rows_of_experts: Rows, drawn: Drawn
) -> None:
    require_right(config_of, of_serial, drawn, rows_of_experts)


@pytest.mark.long
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("number", range(300))
def test_another_draw_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_serial: OfSerial, rows_of_experts: Rows, number: int
) -> None:
    drawn = more()[number]
    # Eight ranks with replicas and stages need more sequences.
    larger = replace(drawn, options=(*drawn.options, "train.global_batch=8"))
    require_right(config_of, of_serial, larger, rows_of_experts)


@pytest.mark.mpi(min_size=4)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("drawn", LAYOUTS[::8], ids=str)
def test_over_mpi_a_drawn_layout_trains_the_model_of_one_process(
    world: Communicator, config_of: MakeConfig, of_serial: OfSerial, drawn: Drawn
) -> None:
    config = world.broadcast_object(config_of(*MODEL, *drawn.options))
    require_serial(config, world, of_serial(of_model(drawn.options)), [None])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.mpi(min_size=8)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("number", range(6))
def test_over_mpi_a_drawn_layout_of_eight_ranks_trains_the_model_of_one_process(
    world: Communicator, config_of: MakeConfig, of_serial: OfSerial, number: int
) -> None:
    drawn = [each for each in more() if each.ranks == 8][number]
    options = (*drawn.options, "train.global_batch=8")
    config = world.broadcast_object(config_of(*MODEL, *options))
    require_serial(config, world, of_serial(of_model(options)), [None])


# --- 16 bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("drawn", HALVES, ids=str)
def test_in_16_bits_a_drawn_layout_has_the_course_of_one_process_and_half_the_bytes(
    config_of: MakeConfig, precision: str, drawn: Drawn
) -> None:
    told = (f"train.precision={precision}", "train.steps=4", "optimizer.name=sgd")
    alone = config_of(*MODEL, *of_model(drawn.options), *told, name="alone")
    together = config_of(*MODEL, *drawn.options, *told)
    run_loopback(1, lambda comm: Run(alone, comm).train())
    outcome = run_loopback(drawn.ranks, lambda comm: Run(together, comm).train())[0]
    # A gradient twice as large would show in the norms. A step of float16 that overflows has none; it depends
    # on the ranks, each of which scales its part.
    pairs = [pair for pair in zip(course(together), course(alone), strict=True) if None not in pair]
    assert len(pairs) >= 6
    assert [found for found, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=0.02)
    assert isinstance(outcome, Outcome)
    beyond = set(deviations(outcome).values())
    # A step of float16 that is left out gathers no new parameters.
    assert beyond <= {0} if precision == "bfloat16" else max(beyond) <= 0
    assert outcome.memory.worst.unexplained_nbytes == 0


@pytest.mark.parametrize(
    "drawn", [*HALVES, *(each for each in LAYOUTS if "ZeRO-3" in str(each))][::2], ids=str
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(config_of: MakeConfig, drawn: Drawn) -> None:
    config = config_of(*MODEL, *drawn.options, "train.precision=float16", "optimizer.name=sgd")

    def whole(run: Run) -> list[Tensor]:
        run.optimizer.wait_for_parameters()
        with summon_full_parameters(run.model, write_back=False):
            return [parameter.detach().clone() for parameter in run.model.parameters()]

    def work(comm: Communicator) -> tuple[int, bool]:
        run = Run(config, comm)
        before = whole(run)
        if comm.rank == 0:  # its own rows of the embedding, where there are several

            def overflow(module: nn.Module, args: Any, output: Tensor) -> None:
                output.register_hook(lambda gradient: gradient * torch.inf)

            (embedding,) = (each for name, each in run.model.named_modules() if name.endswith("embed_tokens"))
            embedding.register_forward_hook(overflow)
        run.train_steps(0, 1)
        return run.optimizer.scaler.skipped, all(map(torch.equal, before, whole(run)))

    assert run_loopback(drawn.ranks, work) == [(1, True)] * drawn.ranks
