"""Tuning: who wins, what is written, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.bench import tune
from hpcpar.bench.gpus import use_gpu
from hpcpar.bench.measure import Case
from hpcpar.bench.sweep import SweepOptions
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.select import ANY
from hpcpar.comm.tuning import Entry, tuning_for
from hpcpar.errors import OperationError, PeerFailedError

QUICK = SweepOptions(
    collectives=("allreduce", "send", "alltoall"),
    min_nbytes=4,
    max_nbytes=1024,
    factor=256,
    rounds=1,
    round_s=0.0,
)


def say_nothing(line: str) -> None:
    pass


def test_all_ranks_come_to_the_same_table_of_algorithms_that_there_are() -> None:
    entries = run_loopback(
        2, lambda comm: tune.tune(QUICK, ("float32", "float64"), comm, "MPICH 5.0.2", say_nothing)
    )
    assert entries[0] == entries[1]
    entry = entries[0]
    assert entry.key == ("MPICH 5.0.2", 2, 2, "cpu")
    assert list(entry.rules) == ["allreduce", "alltoall"]
    for collective, by_dtype in entry.rules.items():
        assert list(by_dtype) == [ANY, "float64"]
        for rules in by_dtype.values():
            assert rules[-1][0] == float("inf")
            assert all(name in ALGORITHMS[collective] for _, name in rules)


def test_the_fastest_at_each_size_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(case: Case, options: SweepOptions, comm: Communicator, device: object) -> dict[str, float]:
        return {"ring": 2.0, "direct": 1.0} if case.nbytes < 100 else {"ring": 1.0, "direct": 2.0}

    monkeypatch.setattr(tune, "time_all", timed)
    said: list[str] = []
    entry = run_loopback(2, lambda comm: tune.tune(QUICK, ("float32",), comm, "", said.append))[0]
    assert entry.rules["allreduce"] == {ANY: ((64.0, "direct"), (float("inf"), "ring"))}
    assert " ".join(said[0].split()) == "allreduce float32 4 B direct 1.0 s then, times as long: ring 2.00"
    assert said[2] == "allreduce, float32: direct up to 4 B, then ring"


def test_a_change_must_be_worth_it() -> None:
    assert tune.winner({"ring": 1.04, "direct": 1.0}, "ring") == "ring"
    assert tune.winner({"ring": 1.06, "direct": 1.0}, "ring") == "direct"
    assert tune.winner({"ring": 1.04, "direct": 1.0}, "") == "direct"
    assert tune.winner({"ring": 1.04, "direct": 1.0}, "native") == "direct"


def test_one_rank_has_nothing_to_tune() -> None:
    with pytest.raises(OperationError, match="one rank has nothing to choose by"):
        tune.tune(QUICK, ("float32",), Communicator.alone(), "", say_nothing)


@pytest.mark.parametrize(
    ("collectives", "dtypes"), [(("send", "send_window"), ("float32",)), (("allreduce",), ())]
)
def test_where_nothing_is_to_be_chosen_nothing_is_written(
    collectives: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    def tuned(comm: Communicator) -> None:
        with pytest.raises(OperationError, match="nothing to choose for"):
            tune.tune(replace(QUICK, collectives=collectives), dtypes, comm, "", say_nothing)

    run_loopback(2, tuned)


@pytest.mark.parametrize(
    ("options", "words"),
    [(QUICK, "copied to the host for every call here"), (replace(QUICK, shared=True), "without --shared")],
)
def test_arrays_on_gpus_are_measured_only_where_they_move_as_they_are(
    options: SweepOptions, words: str
) -> None:
    def tuned(comm: Communicator) -> str:
        with pytest.raises(OperationError) as caught:
            tune.tune(options, ("float32",), comm, "", say_nothing, torch.device("cuda"))
        return str(caught.value)

    assert all(words in said for said in run_loopback(2, tuned))


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_gpus_our_own_algorithms_are_timed(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to choose by")
    entry = tune.tune(QUICK, ("float32",), world, "", say_nothing, use_gpu(world))
    assert entry.device == "cuda"
    assert all(name in ALGORITHMS["allreduce"] for _, name in entry.rules["allreduce"][ANY])


def test_an_algorithm_that_is_wrong_stops_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "wrong_elements", lambda candidate, *others: int(candidate.name == "ring"))

    def tuned(comm: Communicator) -> str:
        with pytest.raises(OperationError) as caught:
            tune.tune(QUICK, ("float32",), comm, "", say_nothing)
        return str(caught.value)

    assert all("allreduce by 'ring'" in words for words in run_loopback(2, tuned))


def test_what_is_kept_is_chosen_by(tmp_path: Path) -> None:
    path = tmp_path / "tuning.toml"
    entry = Entry("MPICH 5.0.2", 2, 2, {"allreduce": {ANY: ((float("inf"), "direct"),)}})
    run_loopback(2, lambda comm: tune.keep(entry, path, comm))
    table = tuning_for("MPICH 5.0.2", path.read_text(), str(path)).table((0, 0))
    assert table.name("allreduce", 8) == "direct"


def test_a_file_that_cannot_be_written_fails_on_every_rank(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    entry = Entry("MPICH 5.0.2", 2, 2, {})

    def kept(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as caught:
            tune.keep(entry, in_the_way / "tuning.toml", comm)
        return str(caught.value)

    assert all("writing" in words for words in run_loopback(2, kept))
