"""Everything with everything: drawn layouts train the model of one process and send what theory says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import summon_full_parameters
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.models import LlamaStages
from hpcpar.planner.memory import STATE
from hpcpar.planner.stage_memory import ACTIVATIONS
from hpcpar.tensor_parallel import own_shard
from hpcpar.training import Config, Outcome, Run
from hpcpar.training.metrics import records_of
from tests.training.conftest import configs_in
from tests.training.layouts import Drawn, pairwise
from tests.training.runs import SEQUENCE, MakeConfig, course, deviations, require_same_on_all, trained
from tests.training.test_expert_parallel import BALANCED


class Serial(NamedTuple):
    """A run of one process: parameters, losses and norms of all steps, held-out loss, records of experts."""

    values: dict[str, Tensor]
    course: list[float]
    held_out: float
    experts: list[dict[str, Any]]


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


SEQUENCE_PARALLEL = ("mesh.tp=2", SEQUENCE)
TIED = "model.tie_embeddings=true"
SGD, MUON = "optimizer.name=sgd", "optimizer.name=muon"
PACKED = (*("data.pack_documents=true", "train.sequence=400"), *("train.steps=4", "train.evaluate_every=2"))
"""A sequence with several of the documents of the test's text, which have about 500 bytes."""
THIRDS = (
    *("model.hidden_size=24", "model.heads=12", "model.kv_heads=6", "model.ffn_size=48"),
    "train.sequence=24",
)
"""Divisible by 2, 3 and 4."""
PIPELINE = ("mesh.pp=2", "train.microbatch=1")
INTERLEAVED = (*PIPELINE, "pipeline.schedule=interleaved", TIED)
KEPT = ("optimizer.zero_stage=3", "optimizer.reshard=step")
FIVE = ("model.experts.count=5", "model.experts.per_token=2", "model.experts.ffn_size=8")
"""Experts that do not divide among ranks."""

CHOSEN: list[tuple[int, tuple[str, ...]]] = [
    # Tensor parallelism: 3 and 4 ranks, fewer heads of keys and values than ranks, norms of heads.
    (3, ("mesh.tp=3", *THIRDS, "model.kv_heads=1", TIED)),
    (3, ("mesh.tp=3", *THIRDS, SEQUENCE, "tensor_parallel.chunks=2", "optimizer.zero_stage=1", SGD)),
    (4, ("mesh.tp=4", TIED, SGD)),
    (4, ("mesh.tp=4", "model.qk_norm=head")),
    (2, (*SEQUENCE_PARALLEL, "model.qk_norm=head", "train.recompute=full")),
    (
        4,
        (
            *("mesh.tp=4", SEQUENCE, "tensor_parallel.gather_again=true", "tensor_parallel.chunks=2"),
            *("train.recompute=selective", "model.kv_heads=4"),
        ),
    ),
    (4, ("mesh.tp=2", "train.recompute=full", "optimizer.zero_stage=3", "model.kv_heads=1", TIED)),
    (
        2,
        (
            *SEQUENCE_PARALLEL,
            *("train.recompute=full", "train.recompute_layers=1", "tensor_parallel.overlap=false"),
        ),
    ),
    # Some of three replicas have no sequence in their second microbatch.
    (6, (*SEQUENCE_PARALLEL, "optimizer.zero_stage=2", "train.microbatch=1")),
    # Context parallelism: 4 ranks, uneven parts, documents, accumulation over three microbatches.
    (4, ("mesh.cp=4", "context_parallel.method=ring", "train.sequence=23")),
    (4, ("mesh.cp=4", "optimizer.zero_stage=3", SGD)),
    (4, ("mesh.cp=4", "context_parallel.method=ulysses+ring", "context_parallel.inner=2")),
    (4, ("mesh.cp=2", "mesh.tp=2", "context_parallel.keep=true", "train.recompute=selective")),
    (4, ("mesh.cp=2", "optimizer.zero_stage=2", "train.global_batch=12", MUON)),
    (6, ("mesh.cp=2", "optimizer.zero_stage=2", "train.microbatch=1")),
    (2, ("mesh.cp=2", "optimizer.zero_stage=1", "train.global_batch=6", *PACKED, SGD)),
    (4, ("mesh.cp=2", "optimizer.zero_stage=3", "context_parallel.method=ulysses", *PACKED)),
    (4, ("mesh.cp=2", *SEQUENCE_PARALLEL, *PACKED)),
    (4, ("mesh.cp=2", *PIPELINE, *PACKED)),
    # Pipelines: 3 and 4 ranks, the other schedules, several buckets, ZeRO.
    (3, ("mesh.pp=3", "train.microbatch=1", "pipeline.balance=[1, 2, 1]")),
    (3, ("mesh.pp=3", "train.microbatch=1", "pipeline.schedule=zb-h2", TIED, SGD)),
    (4, ("mesh.pp=4", "train.microbatch=1", "pipeline.schedule=zb-h1", TIED)),
    (4, (*PIPELINE, *SEQUENCE_PARALLEL, "pipeline.schedule=eager-1f1b", "train.recompute=full", TIED)),
    (2, (*PIPELINE, "pipeline.schedule=automatic", "pipeline.memory_limit=3")),
    (4, (*PIPELINE, "pipeline.schedule=dualpipe-v", "optimizer.zero_stage=1", TIED)),
    (4, (*PIPELINE, "pipeline.schedule=zb-v", "optimizer.zero_stage=1", "optimizer.bucket_mib=0.001", SGD)),
    (4, (*PIPELINE, "pipeline.schedule=zb-h1", "optimizer.bucket_mib=0.001", TIED)),
    (4, (*INTERLEAVED, "optimizer.zero_stage=2", SGD)),
    (4, (*INTERLEAVED, "optimizer.zero_stage=3", SGD)),
    (4, (*INTERLEAVED, *KEPT)),
    (4, (*PIPELINE, *KEPT, "optimizer.shared_parameters=true", TIED)),
    # Experts that do not divide, with losses, biases and a shared one; capacities; halves.
    (3, ("mesh.ep=3", *FIVE, *BALANCED, SGD)),
    (3, ("mesh.ep=3", *FIVE, "optimizer.zero_stage=2", "train.microbatch=1")),
    (4, ("mesh.ep=2", *FIVE, *BALANCED, "optimizer.zero_stage=1", MUON)),
    (4, ("mesh.ep=2", *FIVE, *BALANCED, "optimizer.zero_stage=3", "train.recompute=full", MUON)),
    (4, ("mesh.ep=4", "mesh.tp=2", *FIVE, *BALANCED, "optimizer.zero_stage=2", MUON)),
    (4, ("mesh.ep=4", "mesh.tp=2", *FIVE, *BALANCED, "model.experts.capacity_factor=1.0")),
    (4, ("mesh.ep=2", *SEQUENCE_PARALLEL, "mesh.etp=2", *FIVE, *BALANCED, "optimizer.zero_stage=1", MUON)),
    (
        4,
        (
            "mesh.ep=4",
            "mesh.cp=2",
            *FIVE,
            *BALANCED,
            "train.recompute=selective",
            "expert_parallel.halves=true",
        ),
    ),
    (4, ("mesh.ep=2", "mesh.cp=2", "mesh.tp=2", *FIVE, SGD)),
    (4, ("mesh.ep=2", *PIPELINE, *FIVE, *BALANCED, "pipeline.balance=measured")),
    # Shards over some of the replicas; a group has each expert once, or twice and shards it.
    (4, ("mesh.dp_shard=2", "optimizer.zero_stage=2", SGD)),
    (4, ("mesh.dp_shard=1", "mesh.cp=2", "optimizer.zero_stage=3")),
    (8, ("mesh.dp_shard=2", *SEQUENCE_PARALLEL, "optimizer.zero_stage=2")),
    (8, ("mesh.dp_shard=2", *PIPELINE, "optimizer.zero_stage=1")),
    (8, ("mesh.dp_shard=2", "mesh.ep=2", *FIVE, "optimizer.zero_stage=1", "train.global_batch=8")),
    (8, ("mesh.dp_shard=4", "mesh.ep=2", *FIVE, "optimizer.zero_stage=3", "train.global_batch=8")),
    # Muon.
    (3, (MUON, "optimizer.zero_stage=1", "train.microbatch=1")),
    (4, (MUON, "optimizer.zero_stage=2", "mesh.dp_shard=2")),
    (4, (MUON, "optimizer.zero_stage=3", "mesh.dp_shard=2")),
    (4, (MUON, "optimizer.zero_stage=1", "mesh.tp=2")),
    (4, (MUON, "optimizer.zero_stage=3", *SEQUENCE_PARALLEL)),
    (4, (MUON, "optimizer.zero_stage=1", *PIPELINE)),
]
"""Ranks and options: what no drawn layout has, as it is no feature there, or takes more ranks."""

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
    of_steps = ("train.global_batch", "train.sequence", "train.steps", "train.evaluate_every")
    computed = ("model.", "data.", "optimizer.name", *of_steps)
    values = dict(each.split("=", 1) for each in options if each.startswith(computed))
    return tuple(f"{key}={values[key]}" for key in sorted(values))


def experts_of(config: Config) -> list[dict[str, Any]]:
    """How each step used its experts; none of a model without."""
    records = records_of(config.output.directory / "metrics.jsonl")
    return [record["experts"] for record in records if "experts" in record]


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
            return Serial(values, course(config), outcome.held_out_loss, experts_of(config))

        serial = run_loopback(1, work)[0]
        assert min(serial.course[1::2]) > 0.2  # every gradient was clipped
        return serial

    return trained


def require_serial(
    config: Config, comm: Communicator, whole: Serial, unknown: Collection[None] = ()
) -> Outcome:
    """Train a layout; every parameter, loss, norm and byte is as it must be, on every rank. Collective.

    unknown   [None] where the theory does not say all bytes, or earlier runs' communicators are counted, too
    """
    run = Run(config, comm)
    outcome = run.train()
    assert isinstance(outcome, Outcome)
    run.optimizer.wait_for_parameters()
    tied = run.model.tied_names if isinstance(run.model, LlamaStages) else {}
    with torch.no_grad(), summon_full_parameters(run.model, write_back=False):
        off = {
            name: (own_shard(part, whole.values[tied.get(name, name)]) - part).abs().max().item()
            for name, part in run.model.named_parameters()
        }
    assert max(off.values()) < 1e-10, off
    assert course(config) == pytest.approx(whole.course, abs=1e-10)
    assert outcome.held_out_loss == pytest.approx(whole.held_out, abs=1e-10)
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


def require_right(
    config_of: MakeConfig, of_serial: OfSerial, ranks: int, options: tuple[str, ...], rows: Rows
) -> None:
    whole = of_serial(of_model(options))
    config = config_of(*MODEL, *options)
    # The theory says nothing of tp and pp where the documents tell how many tokens a rank has, nor of tp
    # where a capacity tells how many an expert takes.
    unknown = [None] if config.data.pack_documents or "capacity_factor" in " ".join(options) else []
    outcomes = run_loopback(ranks, lambda comm: require_serial(config, comm, whole, unknown), timeout_s=240)
    require_same_on_all(outcomes)
    shared = {axis for axis in ("pp", "cp", "tp") if getattr(config.mesh, axis) > 1}
    assert shared <= {name.split("-")[0] for name, _ in deviations(outcomes[0])}
    exchanged = [line for line in outcomes[0].traffic if line.communicator.split("-")[0] == "ep"]
    passes = 3 if config.train.recompute == "full" else 2
    expected = sum(nbytes * (passes if is_trained else 1) for nbytes, is_trained in rows)
    assert sum(line.nbytes_sent for line in exchanged if line.collective == "alltoall") == expected
    assert expected or config.mesh.ep == 1
    summary = json.loads((config.output.directory / "summary.json").read_text())
    for line in summary["prediction"]["figures"]:
        if line["what"] in (*STATE, ACTIVATIONS) and line["error"] is not None:
            # Loads of experts are a mean, and who owns most of Muon's matrices need not own most experts.
            of_experts = 0.075 if config.optimizer.name == "muon" else 0.05
            assert abs(line["error"]) < (of_experts if config.mesh.ep > 1 else 0.015), line
    for own, others in zip(experts_of(config), whole.experts, strict=True):
        for key in ("layer", "max_over_mean", "idle", "balance_loss", "z_loss"):
            assert own[key] == pytest.approx(others[key], abs=1e-10), key


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("drawn", LAYOUTS, ids=str)
def test_a_drawn_layout_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_serial: OfSerial, rows_of_experts: Rows, drawn: Drawn
) -> None:
    require_right(config_of, of_serial, drawn.ranks, drawn.options, rows_of_experts)


def as_id(told: int | tuple[str, ...]) -> str:
    """Name ranks or options; sizes of the model left out."""
    if isinstance(told, int):
        return f"{told} ranks"
    return " ".join(each for each in told if not each.startswith(("model.", "data.", "train.s", "train.e")))


@pytest.mark.usefixtures("in_float64", "gradients_of_any_size_are_added_in_place")
@pytest.mark.parametrize(("ranks", "options"), CHOSEN, ids=as_id)
def test_a_chosen_layout_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_serial: OfSerial, rows_of_experts: Rows, ranks: int, options: tuple[str, ...]
) -> None:
    require_right(config_of, of_serial, ranks, options, rows_of_experts)


@pytest.mark.long
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("number", range(300))
def test_another_draw_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_serial: OfSerial, rows_of_experts: Rows, number: int
) -> None:
    drawn = more()[number]
    # Eight ranks with replicas and stages need more sequences.
    options = (*drawn.options, "train.global_batch=8")
    require_right(config_of, of_serial, drawn.ranks, options, rows_of_experts)


@pytest.mark.mpi(min_size=4)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("drawn", LAYOUTS[::8], ids=str)
def test_over_mpi_a_drawn_layout_trains_the_model_of_one_process(
    world: Communicator, config_of: MakeConfig, of_serial: OfSerial, drawn: Drawn
) -> None:
    config = world.broadcast_object(config_of(*MODEL, *drawn.options))
    require_serial(config, world, of_serial(of_model(drawn.options)), [None])


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("axis", "options"),
    [
        ("tp", (SEQUENCE, "optimizer.zero_stage=3", "tensor_parallel.chunks=2")),
        ("cp", (*PACKED, "optimizer.zero_stage=3")),
        ("pp", (TIED, "train.microbatch=1", "optimizer.zero_stage=1", SGD)),
        ("ep", (*FIVE, *BALANCED, "optimizer.zero_stage=3")),
    ],
)
def test_over_mpi_any_number_of_ranks_trains_the_model_of_one_process(
    world: Communicator, config_of: MakeConfig, of_serial: OfSerial, axis: str, options: tuple[str, ...]
) -> None:
    degree = next(degree for degree in (2, 3, world.size) if world.size % degree == 0)
    told = (*THIRDS, *options, f"mesh.{axis}={degree}")
    config = world.broadcast_object(config_of(*MODEL, *told))
    require_serial(config, world, of_serial(of_model(told)), [None])


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
    trained(alone)
    outcomes = trained(together, drawn.ranks)
    require_same_on_all(outcomes)
    # A gradient twice as large would show in the norms. A step of float16 that overflows has none; it depends
    # on the ranks, each of which scales its part.
    pairs = [pair for pair in zip(course(together), course(alone), strict=True) if None not in pair]
    assert len(pairs) >= 6
    assert [found for found, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=0.02)
    beyond = deviations(outcomes[0])
    # A step of float16 that is left out gathers no new parameters.
    is_sent = {name: precision == "bfloat16" or name.split("-")[0] in ("pp", "tp") for name, _ in beyond}
    assert all(nbytes == 0 if is_sent[name] else nbytes <= 0 for (name, _), nbytes in beyond.items()), beyond
    assert outcomes[0].memory.worst.unexplained_nbytes == 0


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
