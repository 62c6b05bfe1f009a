"""`hpcpar bench`: its options, its exit statuses, and a run of each command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpcpar.bench.measure import COPY, PLACES, Case, Place, ResultRow, Timing, row
from hpcpar.cli import bench
from hpcpar.planner.cluster import Cluster
from tests.command import run

Run = Callable[..., "subprocess.CompletedProcess[str]"]

QUICK = ("--max-bytes", "1K", "--factor", "256", "--rounds", "1", "--round-seconds", "0.001")


def test_the_collectives_are_those_that_can_be_measured() -> None:
    assert list(bench.COLLECTIVES) == list(PLACES)


@pytest.mark.parametrize("name", list(bench.COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = CliRunner().invoke(bench.bench, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"{name} [OPTIONS]" in done.output


def test_help_lists_the_commands() -> None:
    done = CliRunner().invoke(bench.bench, ["--help"])
    assert all(f"  {name} " in done.output for name in bench.COMMANDS)


@pytest.mark.parametrize(("option", "value"), [("--min-bytes", "many"), ("--collective", "sum")])
def test_a_value_that_is_not_understood_is_a_usage_error(option: str, value: str) -> None:
    done = CliRunner().invoke(bench.collectives, [option, value])
    assert done.exit_code == 2
    assert value in done.output


def test_all_stands_for_every_collective() -> None:
    options = bench._options(collectives=("all",), min_nbytes=4, max_nbytes=8, round_s=0.1, dtype="int32")
    assert options.collectives == bench.COLLECTIVES
    assert (options.min_nbytes, options.max_nbytes, options.round_s) == (4, 8, 0.1)
    assert options.dtype == "int32"


def test_names_are_separated_by_commas() -> None:
    command = click.Command("c")
    assert bench._names(click.Context(command), click.Option(["--x"]), "ring, mpi,") == ("ring", "mpi")


@pytest.mark.long
def test_measuring_and_fitting_on_two_ranks(run_ranks: Run, tmp_path: Path) -> None:
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    wanted = ("--collective", "allreduce", "--collective", "allgather", "--candidates", "chosen,ring,mpi")
    files = ("--json", str(lines), "--output", str(picture))
    done = run_ranks(2, "-m", "hpcpar", "bench", "collectives", *QUICK, *wanted, *files)
    assert done.returncode == 0, done.stderr
    assert "# ranks: 2" in done.stdout
    assert "in place, chosen against mpi" in done.stdout
    told, *rows = (json.loads(line) for line in lines.read_text().splitlines())
    assert told["benchmark"] == "collectives"
    assert {row["algorithm"] for row in rows} == {"chosen", "ring", "mpi", "memory_copy"}
    assert {row["wrong"] for row in rows} == {0}
    assert picture.stat().st_size > 1000
    fitted = CliRunner().invoke(bench.fit, [str(lines), "--machine", str(tmp_path / "machine.toml")])
    assert fitted.exit_code == 0, fitted.output
    assert "alpha_intra" in fitted.output
    assert Cluster.read(tmp_path / "machine.toml").devices_per_node == 2
    refused = CliRunner().invoke(bench.fit, [str(lines), "--machine", "machine"])
    assert "name a .toml file, or 'own'" in refused.output


@pytest.mark.parametrize("command", ["collectives", "tune"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_time_is_finite_and_not_negative(command: str, value: str) -> None:
    done = CliRunner().invoke(getattr(bench, command), ["--round-seconds", value])
    assert done.exit_code == 2
    assert "Invalid value for '--round-seconds'" in done.output


MISTAKES = {
    "unknown candidate": (["collectives", "--candidates", "chosen,nosuch"], "no candidate nosuch; there are"),
    "no sizes": (["collectives", "--max-bytes", "2"], "--min-bytes 4 is above --max-bytes 2"),
    "nothing to tune": (["tune", "--max-bytes", "2"], "--min-bytes 4 is above --max-bytes 2"),
    "first size": (["collectives", "--min-bytes", "0"], "--min-bytes 0 is no size to begin with"),
    "format": (["collectives", "--output", "a.foo"], "a.foo cannot be drawn: .foo is no format of pictures"),
    "table": (["tune", "--file", "/"], "/ cannot be read as a table"),
    "place of a table": (["tune", "--file", "/dev/null/t.toml"], "/dev/null/t.toml cannot be"),
    "lines": (["collectives", "--json", "/nonexist/a.json"], "there is no directory /nonexist"),
    "lines of a comparison": (["compare", "--json", "/nonexist/a.json"], "there is no directory /nonexist"),
    "picture": (["collectives", "--output", "/nonexist/a.png"], "there is no directory /nonexist"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_work_is_refused_before_anything_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hpcpar
    from hpcpar.bench import sweep, tune
    from hpcpar.comm import Communicator
    from hpcpar.training import comparison

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measuring has begun")

    monkeypatch.setenv("HPCPAR_TUNING", "none")
    for module, function in ((sweep, "run"), (tune, "tune"), (comparison, "compare")):
        monkeypatch.setattr(module, function, refuse)
    monkeypatch.setattr(hpcpar, "init", lambda **_: Communicator.alone())
    words, message = MISTAKES[name]
    done = CliRunner().invoke(bench.bench, words, standalone_mode=False)
    assert done.return_value == bench.CANNOT_WORK
    assert f"hpcpar bench {words[0]}: " in done.output
    assert message in done.output


@pytest.mark.long
def test_tuning_on_two_ranks_writes_a_table(run_ranks: Run, tmp_path: Path) -> None:
    path = tmp_path / "tuning.toml"
    done = run_ranks(2, "-m", "hpcpar", "bench", "tune", *QUICK, "--file", str(path))
    assert done.returncode == 0, done.stderr
    assert f"written to {path}" in done.stdout
    assert "[tuned.allreduce]" in path.read_text()


def test_tuning_writes_where_hpcpar_tuning_says_and_does_not_read_what_is_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import hpcpar
    from hpcpar.bench import tune
    from hpcpar.comm import Communicator
    from hpcpar.comm.tuning import Entry

    path = tmp_path / "new" / "tuning.toml"
    monkeypatch.setenv("HPCPAR_TUNING", str(path))

    def init() -> Communicator:
        assert os.environ["HPCPAR_TUNING"] == "none"
        return Communicator.alone()

    monkeypatch.setattr(hpcpar, "init", init)
    monkeypatch.setattr(tune, "tune", lambda *_: Entry("MPICH 5.0.2", 2, 2, {}))
    done = CliRunner().invoke(bench.tune, [])
    assert done.exit_code == 0, done.output
    assert f"written to {path}" in done.output
    assert "MPICH 5.0.2" in path.read_text()


def test_tuning_alone_is_refused(tmp_path: Path) -> None:
    import sys

    words = ("hpcpar", "bench", "tune", "--file", tmp_path / "tuning.toml")
    done = run(sys.executable, "-m", *words)
    assert done.returncode == bench.CANNOT_WORK
    assert "hpcpar bench tune: one rank has nothing to choose by" in done.stderr


def test_fitting_to_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("{}")
    done = CliRunner().invoke(bench.fit, [str(path)])
    assert done.exit_code == 1
    assert "has no lines" in done.output


def measured(collective: str, algorithm: str, count: int, seconds: float, place: Place = "in") -> ResultRow:
    return row(Case(collective, count, "float32", "torch", 2), algorithm, place, Timing((seconds,), 1), 0)


ROWS = [
    measured("allreduce", "chosen", 1000, 1e-6),
    measured("allreduce", "chosen", 1000, 2e-6, "out"),
    measured("allreduce", "chosen", 100, 1e-6),
    measured("allreduce", "mpi", 1000, 4e-6),
    measured("allreduce", "ring", 1000, 4e-6),
    measured(COPY, "memory_copy", 1000, 1e-7),
    measured("send", "chosen", 1000, 1e-6),
]


def test_a_line_has_the_better_place_of_every_size_in_rising_order() -> None:
    found = bench.lines(ROWS, "allreduce")
    assert list(found) == ["chosen", "mpi", "ring"]
    assert [nbytes for nbytes, _ in found["chosen"]] == [400, 4000]
    assert found["chosen"][1][1] == ROWS[0].busbw_gb_per_s


def test_the_ceiling_is_what_is_copied_per_second() -> None:
    ((nbytes, ceiling),) = bench.lines(ROWS, COPY)["memory_copy"]
    assert nbytes == 4000
    assert round(ceiling, 6) == 40.0


def test_there_is_a_panel_for_each_collective_and_a_line_for_each_candidate() -> None:
    allreduce, send = bench.figure_of(ROWS, {"ranks": 2, "nodes": 1, "mpi": "MPICH 5.0.2"}).axes
    assert (allreduce.get_title(), send.get_title()) == ("allreduce", "send")
    assert [line.get_label() for line in allreduce.lines] == ["chosen", "mpi", "ring", "memory copy"]
