"""Host lists, and what launchers are told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.hosts import (
    Host,
    host_options,
    interface_words,
    kind_of,
    parse_hosts,
    place,
    read_hostfile,
    ssh_variables,
)

TWO = (Host("a", 2), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2", TWO),
        ("a", (Host("a", 1),)),
        (" a:2 , b:2 ", TWO),
        ("a,b:2,a", TWO),
        ("node[1-2,5]:4,login", (Host("node1", 4), Host("node2", 4), Host("node5", 4), Host("login", 1))),
        ("r[1-2]c[01-02]", tuple(Host(name, 1) for name in ("r1c01", "r1c02", "r2c01", "r2c02"))),
    ],
)
def test_hosts_are_read_with_their_slots_in_their_order(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "a:", "a:two", "a:2:3", "a b", "a:0"])
def test_a_host_that_is_not_understood_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not like host|has 0 slots"):
        parse_hosts(text)


def test_a_bracket_that_is_not_closed_is_an_error() -> None:
    with pytest.raises((ConfigError, LaunchError), match=r"bracket|is not like"):
        parse_hosts("node[1-2:4")


def test_a_file_of_hosts_may_be_horovods_open_mpis_or_mpichs(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# our machines\na slots=2\n\nb slots = 1 max_slots=8   # the old one\nb:1\nc\nn[1-2] slots=4\n"
    )
    assert read_hostfile(str(file)) == (*TWO, Host("c", 1), Host("n1", 4), Host("n2", 4))


@pytest.mark.parametrize("most", ["max-slots=8", "max_slots=8", "max-slots = 8"])
def test_the_most_slots_that_a_host_may_have_are_not_the_ones_that_it_has(most: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"a {most} slots=2\nb slots=2 {most}\nc {most}\n")
    assert read_hostfile(str(file)) == (*TWO, Host("c", 1))


@pytest.mark.parametrize("line", ["a slot=2", "a:2 slots=2", "a b", "slots=2"])
def test_a_line_that_is_not_understood_is_named_with_its_number(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"a:1\n{line}\n")
    with pytest.raises(ConfigError, match=r"hosts, line 2: .* is not like"):
        read_hostfile(str(file))


def test_a_file_of_hosts_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names none"):
        read_hostfile(str(tmp_path / "empty"))


def test_hosts_are_filled_in_their_order() -> None:
    assert place(TWO, 4) == TWO
    assert place(TWO, 3) == (Host("a", 2), Host("b", 1))
    assert place(TWO, 2) == (Host("a", 2),)


def test_more_ranks_than_slots_are_refused_with_the_slots_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"5 ranks were asked for, but the hosts have 4 slots \(a:2, b:2\)"):
        place(TWO, 5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mpich", ("-hosts", "a:2,b:2")),
        ("openmpi", ("--host", "a:2,b:2")),
        ("intel", ("-machinefile", "/run/hosts")),
        ("srun", ("--nodelist=a,b", "--nodes=2", "--ntasks-per-node=2")),
    ],
)
def test_each_launcher_is_told_in_its_own_words(kind: str, words: tuple[str, ...]) -> None:
    found = host_options(kind, TWO, "/run")
    assert found.words == words
    assert found.file_text == ("a:2\nb:2\n" if kind == "intel" else "")


def test_srun_gets_a_line_for_each_rank_where_hosts_have_different_numbers() -> None:
    found = host_options("srun", (Host("a", 2), Host("b", 1)), "/run")
    assert found.words == ("--distribution=arbitrary",)
    assert found.variables == {"SLURM_HOSTFILE": "/run/hosts"}
    assert found.file_text == "a\na\nb\n"


def test_srun_puts_the_first_ranks_on_the_host_that_is_named_first() -> None:
    assert host_options("srun", TWO, "/run", ("a", "b", "c")).file_text == ""
    found = host_options("srun", TWO[::-1], "/run", ("a", "b", "c"))
    assert (found.words, found.file_text) == (("--distribution=arbitrary",), "b\nb\na\na\n")


def test_a_launcher_that_is_not_known_is_not_guessed_at() -> None:
    with pytest.raises(ConfigError, match="--options="):
        host_options("", TWO, "/run")


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515", "intel"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.6", "openmpi"),
        ("something else 1.0", ""),
    ],
)
def test_a_launcher_is_known_by_its_version(version: str, kind: str) -> None:
    assert kind_of(version) == kind


def test_network_interfaces_are_said_to_those_that_can_hear_it() -> None:
    assert interface_words("mpich", ()) == ()
    assert interface_words("mpich", ("ib0",)) == ("-iface", "ib0")
    assert interface_words("openmpi", ("ib0", "ib1")) == ("--mca", "btl_tcp_if_include", "ib0,ib1")
    with pytest.raises(ConfigError, match="a single one"):
        interface_words("mpich", ("ib0", "ib1"))
    with pytest.raises(ConfigError, match="srun has no option"):
        interface_words("srun", ("ib0",))


def test_ssh_is_told_its_port_and_key_by_every_mpiexecs_variable() -> None:
    assert ssh_variables(None, None) == {}
    assert set(ssh_variables(None, "key").values()) == {"-i key"}
    assert ssh_variables(22, "key") == dict.fromkeys(
        (
            "HYDRA_LAUNCHER_EXTRA_ARGS",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
            "OMPI_MCA_plm_rsh_args",
            "PRTE_MCA_plm_ssh_args",
        ),
        "-p 22 -i key",
    )
