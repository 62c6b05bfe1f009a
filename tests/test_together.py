from __future__ import annotations

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import PeerFailedError
from hpcpar.together import together


def test_an_error_on_one_rank_is_raised_on_all_and_names_it() -> None:
    def attempt(comm: Communicator) -> tuple[str, str]:
        try:
            with together(comm, "opening the safe"):
                if comm.rank == 1:
                    raise FileNotFoundError("no key")
        except PeerFailedError as error:
            return str(error), repr(error.__cause__)
        return "nothing", "raised"

    told = run_loopback(3, attempt)
    for message, _ in told:
        assert "opening the safe" in message
        assert "rank 1: FileNotFoundError: no key" in message
    assert [cause for _, cause in told] == ["None", "FileNotFoundError('no key')", "None"]


def test_a_block_that_succeeds_everywhere_raises_nowhere() -> None:
    def attempt(comm: Communicator) -> int:
        with together(comm, "counting"):
            value = comm.rank + 1
        return value

    assert run_loopback(2, attempt) == [1, 2]


def test_a_rank_alone_sees_its_own_error_as_the_cause() -> None:
    with pytest.raises(PeerFailedError) as caught, together(Communicator.alone(), "trying"):
        raise ValueError("wrong")
    assert isinstance(caught.value.__cause__, ValueError)
