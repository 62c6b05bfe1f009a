from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
INSTALLED_BY_MAKE = ("", "dev", "mpich", "openmpi")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, list[Requirement]]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    table: dict[str, list[Requirement]] = {}
    for line in filter(None, lines):
        table.setdefault(normal(Requirement(line).name), []).append(Requirement(line))
    return table


def needed() -> list[Requirement]:
    requirements = [Requirement(text) for text in importlib.metadata.requires("hpcpar") or ()]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in INSTALLED_BY_MAKE)
    ]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_package_has_one_exact_version_for_each_python(python: str) -> None:
    for name, lines in pins().items():
        fitting = [p for p in lines if p.marker is None or p.marker.evaluate({"python_version": python})]
        assert len(fitting) == 1, name
        assert re.fullmatch(r"==[^*,]+", str(fitting[0].specifier)), name


def test_what_the_package_needs_is_pinned_to_a_version_that_it_accepts() -> None:
    table = pins()
    for requirement in needed():
        for pin in table[normal(requirement.name)]:
            version = str(pin.specifier).removeprefix("==")
            assert requirement.specifier.contains(version), requirement


def test_every_extra_that_users_are_told_of_is_there() -> None:
    extras = importlib.metadata.metadata("hpcpar").get_all("Provides-Extra") or []
    assert set(extras) == {"mpich", "openmpi", "cuda12", "cuda13", "horovod", "ray", "examples", "dev"}


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:examples|hpcpar|docs|benchmarks)/[\w/.-]+\.(?:py|toml|md)", text))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
