from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import hpcpar

ROOT = Path(__file__).parent.parent
INSTALLED_BY_MAKE = ("", "train", "examples", "horovod", "dev", "docs", "mpich", "openmpi")


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


def in_setup(name: str) -> list[str]:
    """A list of strings that setup.py gives a name."""
    listed = re.search(rf"^{name} = (\[.*?\])$", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    value = ast.literal_eval(listed[1])
    assert isinstance(value, list)
    return value


def test_every_file_beside_the_modules_is_part_of_an_installed_package() -> None:
    found = {path for pattern in in_setup("FILES") for path in (ROOT / "hpcpar").glob(pattern)}
    files = {path for path in (ROOT / "hpcpar").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert found == files


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_package_has_one_exact_version_for_each_python(python: str) -> None:
    for name, lines in pins().items():
        fitting = [p for p in lines if p.marker is None or p.marker.evaluate({"python_version": python})]
        assert len(fitting) == 1 or (python == "3.10" and not fitting), name
        assert all(re.fullmatch(r"==[^*,]+", str(pin.specifier)) for pin in fitting), name


@pytest.mark.parametrize("python", ["3.10", "3.12", "3.14"])
def test_what_is_installed_here_is_pinned_only_for_pythons_that_it_serves(python: str) -> None:
    for name, lines in pins().items():
        for pin in lines:
            try:
                found = importlib.metadata.metadata(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            is_this = str(pin.specifier) == f"=={found['Version']}"
            applies = pin.marker is None or pin.marker.evaluate({"python_version": python})
            if is_this and applies and found["Requires-Python"]:
                assert SpecifierSet(found["Requires-Python"]).contains(f"{python}.9"), f"{pin} on {python}"


def test_what_the_package_needs_is_pinned_to_a_version_that_it_accepts() -> None:
    table = pins()
    for requirement in needed():
        for pin in table[normal(requirement.name)]:
            version = str(pin.specifier).removeprefix("==")
            assert requirement.specifier.contains(version), requirement


def test_every_extra_that_users_are_told_of_is_there() -> None:
    extras = importlib.metadata.metadata("hpcpar").get_all("Provides-Extra") or []
    assert set(extras) == {
        "train",
        "pictures",
        "mpich",
        "openmpi",
        "cuda12",
        "cuda13",
        "parquet",
        "horovod",
        "keras",
        "ray",
        "examples",
        "docs",
        "dev",
    }


CORE_ALONE = """
import sys
for name in ("pydantic", "safetensors", "tokenizers", "matplotlib"):
    sys.modules[name] = None  # as if it were not installed
import hpcpar.data_parallel, hpcpar.tensor_parallel, hpcpar.pipeline_parallel, hpcpar.context_parallel
import hpcpar.expert_parallel, hpcpar.models, hpcpar.horovod.torch, hpcpar.torch_backend
import hpcpar.planner.estimate
from hpcpar.cli import main
try:
    hpcpar.parallelize_llama
except ModuleNotFoundError as error:
    assert "pip install 'hpcpar[train]'" in str(error), error
else:
    raise AssertionError
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as end:
        print(f"{words}: {end.code}")
"""
WITHOUT_EXTRAS = {
    "draw ring --size 2": None,
    "plan 5m --machine two-cores": None,
    "draw ring --size 2 --output ring.png": "pictures",
    "train tiny.toml": "train",
    "train --keys": "train",
    "checkpoint convert a b": "train",
    "bench compare": "train",
}


def test_without_extras_commands_run_or_say_in_a_line_which_one_to_install() -> None:
    command = [sys.executable, "-c", CORE_ALONE, *WITHOUT_EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "time: 2α" in done.stdout
    for words, extra in WITHOUT_EXTRAS.items():
        told = rf"Error: this needs \w+, which is not installed: pip install 'hpcpar\[{extra}\]'"
        assert re.search(rf"^{words}: {told if extra else 0}$", done.stdout, re.MULTILINE), words


def test_files_that_the_readme_and_the_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    named = set(
        re.findall(
            r"(?<!share/)(?<!config/)\b(?:examples|hpcpar|docs|benchmarks)/[\w/.-]+\.(?:py|toml|md)", text
        )
    )
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def runs(python: str) -> bool:
    """Return whether there is such a Python: the name may be a version manager's stand-in for none."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0


PYTHONS = [f"python3.{minor}" for minor in range(10, 15) if runs(f"python3.{minor}")]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("python", PYTHONS)
def test_make_train_sets_up_and_trains_with_every_python_of_this_machine_and_no_developers_tools(
    python: str, tmp_path: Path
) -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    words = ["make", "train", f"PYTHON={python}", "MPI=mpich", "ARGS=train.steps=20"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20/20  loss" in done.stdout
    ask = [tmp_path / ".venv/bin/python", "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.lower()
    assert not {"pytest", "mypy", "ray", "transformers"} & {
        line.split("==")[0] for line in listed.splitlines()
    }


def test_the_conda_recipe_needs_what_setup_needs() -> None:
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    run = re.search(r"^  run:\n(.*?)\n\n", recipe, re.MULTILINE | re.DOTALL)
    assert run is not None
    needs = set(re.findall(r"^    - (.+)$", run[1], re.MULTILINE))
    required = [Requirement(text) for text in in_setup("REQUIRED")]
    names = {"torch": "pytorch"}
    assert needs == {"python >=3.10"} | {f"{names.get(r.name, r.name)} {r.specifier}" for r in required}
    assert f'version: "{hpcpar.__version__}"' in recipe
    assert f"version: {hpcpar.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def copied_into_images() -> list[list[str]]:
    """The files that the Dockerfile and the Apptainer definition copy before pip."""
    docker = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    files = re.search(
        r"^%files\n(.*?)\n\n", (ROOT / "jobscripts/hpcpar.def").read_text(), re.MULTILINE | re.DOTALL
    )
    assert files is not None
    return [" ".join(docker).split(), [line.split()[0] for line in files[1].splitlines()]]


def test_the_images_copy_what_a_wheel_with_the_examples_is_made_of(tmp_path: Path) -> None:
    of_docker, of_apptainer = map(sorted, copied_into_images())
    assert of_docker == of_apptainer
    source = tmp_path / "source"
    source.mkdir()
    for name in of_docker:
        (source / name).symlink_to(ROOT / name)
    words = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "base")]
    done = subprocess.run(
        [*words, "--build-lib", str(tmp_path / "lib")],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packed = contents(tmp_path / "lib" / "hpcpar" / "examples")
    assert packed == contents(ROOT / "examples")
    assert Path("course", "1_ring_allreduce.ipynb") in packed
    assert (tmp_path / "lib" / "hpcpar" / "py.typed").exists()


def contents(examples: Path) -> dict[Path, bytes]:
    files = [path for path in examples.rglob("*") if path.suffix in (".py", ".toml", ".ipynb")]
    return {path.relative_to(examples): path.read_bytes() for path in files}
