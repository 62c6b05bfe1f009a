"""examples/ray_models.py: models that are trained at once by Ray, each on several MPI ranks.

On two nodes it runs in tests/slurm/test_jobscripts.py.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpcpar import horovod
from tests import command

pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_models.py"
STEPS = 3


@pytest.fixture
def ray_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module("ray_models")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in ("prose", "numbers", "short"):
        (tmp_path / name).mkdir()
    (tmp_path / "prose" / "a.txt").write_text("It was a dark and stormy night.  \n" * 60)
    (tmp_path / "prose" / "again.txt").write_text("It was a dark and stormy night.\n" * 60)
    (tmp_path / "numbers" / "b.md").write_text("\n".join(str(number**2) for number in range(400)))
    (tmp_path / "short" / "c.txt").write_text("Hello.")
    return tmp_path


@pytest.mark.timeout(240)  # Ray starts in some 5 s, and in 20 s on busy cores
def test_two_models_at_once_are_as_alone_and_one_that_fails_is_named(
    texts: Path, ray_models: ModuleType
) -> None:
    words = ("prose", "short", "numbers", "--cpus", "4", "--steps", str(STEPS), "--output", "weights")
    done = command.run(sys.executable, EXAMPLE, *words, directory=texts, timeout_s=220)
    assert done.returncode == 1, done.stderr
    said = dict(re.findall(r"^(\w+) on .* to (\d\.\d{4}), on held-out text \d\.\d{4}$", done.stdout, re.M))
    assert list(said) == ["prose", "numbers"]
    assert re.search(
        r"^short failed: rank [01] of 2 .* raised ValueError: the text has 6 bytes", done.stderr, re.M
    )
    assert done.stderr.endswith("1 of 3 models failed: short\n")
    assert sorted(path.name for path in (texts / "weights").iterdir()) == ["numbers.pt", "prose.pt"]

    # What `preprocess` makes of each: no trailing blanks, and no text twice.
    cleaned = {
        "prose": "It was a dark and stormy night.\n" * 59 + "It was a dark and stormy night.",
        "numbers": (texts / "numbers" / "b.md").read_text(),
    }
    fit = ray_models.fit

    def fit_each() -> list[dict[str, Any]]:
        return [fit(text.encode(), STEPS) for text in cleaned.values()]

    for name, alone in zip(cleaned, horovod.run(fit_each, num_proc=2)[0], strict=True):
        assert said[name] == f"{alone['losses'][-1]:.4f}"
        weights = torch.load(texts / "weights" / f"{name}.pt")
        assert all(torch.equal(weights[key], value) for key, value in alone["weights"].items())


def test_more_ranks_than_a_node_has_cores_are_refused(
    texts: Path, ray_models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = []

    def init(*, num_cpus: int, **_: object) -> None:
        nodes.append({"Alive": True, "Resources": {"CPU": float(num_cpus)}})

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("sys.argv", ["ray_models.py", str(texts / "prose"), "--cpus", "1"])
    with pytest.raises(SystemExit, match="--ranks 2, but no node has more than 1 cores for Ray: give fewer"):
        ray_models.main()


def test_directories_of_one_name_are_refused(
    texts: Path, ray_models: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ray_models.py", "prose", str(texts / "prose")])
    with pytest.raises(SystemExit, match="2"):
        ray_models.main()
    assert "two directories have one name, as their models would: prose prose" in capsys.readouterr().err
