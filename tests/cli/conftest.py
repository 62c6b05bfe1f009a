"""Run the command line in this process."""

from __future__ import annotations

import pytest

from hpcpar.cli import main
from tests.command import Output


@pytest.fixture
def output(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Output:
    """Run the module's COMMAND with more words; return what it prints, or its errors if it is to fail."""

    def run(*words: object, status: int = 0) -> str:
        with pytest.raises(SystemExit) as caught:
            main([*request.module.COMMAND, *map(str, words)])
        captured = capsys.readouterr()
        assert caught.value.code == status, captured.err
        return captured.err if status else captured.out

    return run
