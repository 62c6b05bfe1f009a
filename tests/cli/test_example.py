from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.cli.example import examples
from tests.command import Output

COMMAND = ["example"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed_with_a_line(output: Output) -> None:
    lines = output().splitlines()
    files = [path.name for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".toml", ".ipynb")]
    assert sorted(line.split()[0] for line in lines) == sorted(files)
    assert all(
        len(line.split()) > 4 and line.endswith((".", "?", ")")) for line in lines if "torch_" not in line
    )


@pytest.mark.parametrize(("name", "file"), [("train", "train.py"), ("tiny.toml", "tiny.toml")])
def test_an_example_is_written_once(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"written: {file}" in output(name)
    assert (tmp_path / file).read_bytes() == (EXAMPLES / file).read_bytes()
    (tmp_path / file).write_text("changed")
    assert "is here already" in output(name, status=1)
    assert (tmp_path / file).read_text() == "changed"


def test_the_course_is_written_whole_or_not_at_all(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5_plan_a_model.ipynb").touch()
    assert "5_plan_a_model.ipynb is here already" in output("course", status=1)
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "5_plan_a_model.ipynb").unlink()
    assert output("course").count("start it by jupyter notebook") == 5
    for path in (EXAMPLES / "course").glob("*.ipynb"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_name_that_is_none_or_two_is_refused(output: Output) -> None:
    assert "did you mean 'tiny'?" in output("tinny", status=2)
    assert "may be mixture.py or mixture.toml" in output("mixture", status=2)


def test_an_installed_package_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hpcpar"
    (package / "examples").mkdir(parents=True)
    (package / "examples" / "one.py").write_text('"""One."""\n')
    monkeypatch.setattr("hpcpar.__file__", str(package / "__init__.py"))
    assert [path.name for path in examples()] == ["one.py"]
