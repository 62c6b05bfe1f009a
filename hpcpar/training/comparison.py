"""Approaches to parallelism, each trained for some steps on the same ranks and model, beside the planner.

memory       of the fullest rank: model state by purpose, activations
sent         bytes of all ranks in a step, without agreements and exchanges of objects
calls        of collectives and messages, of the rank that makes most in a step: what there is to get right
twice        sent and seconds with twice the global batch, over those with the batch: 1.00 for what does not
             depend on it
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError, LayoutError, PeerFailedError
from hpcpar.planner.approaches import approaches
from hpcpar.training.config import Config, parse
from hpcpar.training.prediction import Prediction, predict
from hpcpar.training.traffic_report import TrafficLine, gather_traffic
from hpcpar.training.trainer import Run

MODEL = """
[model]
preset = "tiny"
[train]
sequence = 128
global_batch = 16
microbatch = 4
[data]
max_mib = 1.0
"""
"""What is trained where no file is given."""

WARM_UP = 2
"""Steps before those that count; the first one meets buffers that are not there yet."""


@dataclass(frozen=True)
class Measured:
    """An approach on one rank's view, the same on all.

    run            model and batch in words
    ranks          of the job
    nbytes_sent    by all ranks in a step, of what theory knows
    beyond         bytes more than theory says, in all steps
    calls          in a step, of the rank that makes most
    step_s         median; `steps_s` all of them
    twice          (bytes, seconds) with twice the global batch over these; None: not measured
    """

    name: str
    layout: str
    prediction: Prediction
    nbytes_sent: int
    beyond: int
    calls: float
    steps_s: tuple[float, ...]
    run: str
    ranks: int
    twice: tuple[float, float] | None = None

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {**vars(self), "prediction": self.prediction.as_record(), "step_s": self.step_s}


def measure(name: str, config: Config, comm: Communicator, *, steps: int) -> Measured:
    """Train so many steps after the warm-up, and look at the rank that needs most. Collective."""
    run = Run(config, comm)
    run.train_steps(0, WARM_UP)
    run.optimizer.wait_for_parameters()
    before = _counts(gather_traffic(comm, {}))
    seconds = []
    for step in range(WARM_UP, WARM_UP + steps):
        start = time.perf_counter()
        run.train_steps(step, step + 1)
        seconds.append(time.perf_counter() - start)
    run.optimizer.wait_for_parameters()
    theory = run.expected_traffic([1] * steps, evaluations=0, from_start=False)
    lines = [line for line in gather_traffic(comm, theory) if line.nbytes_theory is not None]
    own = [(line, *before.get((line.communicator, line.collective), (0, 0))) for line in lines]
    sent = sum(line.nbytes_sent - nbytes for line, nbytes, _ in own)
    memory = run.memory_report()
    prediction = predict(
        run,
        memory=memory,
        traffic=[line.with_sent(line.nbytes_sent - nbytes) for line, nbytes, _ in own],
        step_s=statistics.median(seconds),
        expert_load=run.expert_load(memory),
    )
    return Measured(
        name,
        str(run.mesh.layout),
        prediction,
        sent // steps,
        sent - sum(line.nbytes_theory or 0 for line in lines),
        sum(line.calls - calls for line, _, calls in own) / steps,
        tuple(seconds),
        described(config),
        comm.size,
    )


def described(config: Config) -> str:
    """Name model and batch: "tiny, 16 sequences of 128 tokens, float32"."""
    train = config.train
    model = config.model.preset if config.model.hugging_face is None else config.model.hugging_face.name
    return f"{model}, {train.global_batch} sequences of {train.sequence} tokens, {train.precision}"


def compare(
    text: str,
    source: str,
    overrides: Sequence[str],
    comm: Communicator,
    *,
    steps: int,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Measure approaches with the batch of a configuration, and with twice the batch. Collective.

    An approach that these ranks cannot take is left out; `say` gets the reason.

    only     names of approaches; empty: all
    errors   ConfigError for a name that there is not; LayoutError where none is left
    """
    known = approaches(comm.size)
    unknown = set(only) - {each.name for each in known}
    if unknown:
        names = ", ".join(repr(each.name) for each in known)
        raise ConfigError(
            f"there is no approach {sorted(unknown)[0]!r} on {comm.size} ranks; there are {names}"
        )
    found: list[Measured] = []
    for each in known:
        if only and each.name not in only:
            continue
        say(f"{each.name} …")
        of_batch = []
        try:
            for times in (1, 2):
                with configured(text, source, (*overrides, *each.options), comm, times=times) as config:
                    of_batch.append(measure(each.name, config, comm, steps=steps))
        except (LayoutError, PeerFailedError) as error:
            refusal = error.__cause__ or error
            if not isinstance(refusal, LayoutError):  # which all ranks have alike
                raise
            say(f"  cannot be: {refusal}")
            continue
        one, two = of_batch
        ratios = two.nbytes_sent / one.nbytes_sent if one.nbytes_sent else 1.0, two.step_s / one.step_s
        found.append(Measured(**{**vars(one), "twice": ratios}))
    if not found:
        raise refusal
    return found


@contextmanager
def configured(
    text: str, source: str, options: Sequence[str], comm: Communicator, *, times: int = 1
) -> Iterator[Config]:
    """Yield a run's configuration, in a directory that is gone afterwards. Collective.

    times   the batch of the file, to train with
    """
    with tempfile.TemporaryDirectory(prefix="hpcpar-compare-") as own:
        directory = comm.broadcast_object(own)
        config = parse(text, source=source, overrides=(*options, f"output.directory={directory}/run"))
        batch = f"train.global_batch={times * config.train.global_batch}"
        yield parse(text, source=source, overrides=(*options, batch, f"output.directory={directory}/run"))
        comm.barrier()


def _counts(lines: Sequence[TrafficLine]) -> Mapping[tuple[str, str], tuple[int, int]]:
    return {(line.communicator, line.collective): (line.nbytes_sent, line.calls) for line in lines}
