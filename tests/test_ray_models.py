"""examples/ray_models.py: models that are trained at once by Ray, each on several MPI ranks.

On two nodes it runs in tests/slurm/test_jobscripts.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from hpcpar import horovod
from tests import command

pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_models.py"
STEPS = 3


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
    texts: Path, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from ray_models import fit

    # What `preprocess` makes of each: no trailing blanks, and no text twice.
    cleaned = {
        "prose": "It was a dark and stormy night.\n" * 59 + "It was a dark and stormy night.",
        "numbers": (texts / "numbers" / "b.md").read_text(),
    }
    for name, text in cleaned.items():
        alone = horovod.run(fit, args=(text.encode(), STEPS), num_proc=2)[0]
        assert said[name] == f"{alone['losses'][-1]:.4f}"
        weights = torch.load(texts / "weights" / f"{name}.pt")
        assert all(torch.equal(weights[key], value) for key, value in alone["weights"].items())


def test_more_ranks_than_a_node_has_cores_are_refused(texts: Path) -> None:
    done = command.run(sys.executable, EXAMPLE, texts / "prose", "--cpus", "1", directory=texts)
    assert done.returncode == 1
    assert "--ranks 2, but no node has more than 1 cores for Ray: give fewer" in done.stderr


def test_directories_of_one_name_are_refused(texts: Path) -> None:
    done = command.run(sys.executable, EXAMPLE, "prose", texts / "prose", directory=texts)
    assert done.returncode == 2
    assert "two directories have one name, as their models would: prose prose" in done.stderr
