# ruff: noqa: F403, F405, I001

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcpar(PythonPackage):
    """Training PyTorch models over plain MPI, with hand-written collectives."""

    # No version is published yet: the archive is made from the sources at hand and lies in the current
    # directory, or `spack develop` names the sources themselves (modulefiles/README.md).
    manual_download = True
    url = f"file://{os.getcwd()}/hpcpar-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    variant("cuda", default=False, description="PyTorch for NVIDIA GPUs, and CuPy arrays as buffers")
    variant("horovod", default=True, description="What Horovod scripts send around as objects")
    variant("examples", default=False, description="What examples/horovod_digits.py draws its images from")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@69:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-torch@2.5:")
        depends_on("py-torch+cuda", when="+cuda")
        depends_on("py-torch~cuda", when="~cuda")
        depends_on("py-numpy@1.26:")
        depends_on("py-mpi4py@4:")
        depends_on("py-click@8.1:")
        depends_on("py-rich@13:")
        depends_on("py-pydantic@2.5:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-tokenizers@0.15:")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-tomli@2:", when="^python@:3.10")
        depends_on("py-cupy@14:", when="+cuda")
        depends_on("py-cloudpickle@2:", when="+horovod")
        depends_on("py-scikit-learn@1.3:", when="+examples")

    depends_on("mpi", type=("build", "link", "run"))

    def setup_run_environment(self, env: EnvironmentModifications) -> None:
        """A bare `srun python train.py` speaks the MPI's language, and a lost rank ends its job."""
        env.set("SLURM_KILL_BAD_EXIT", "1")
        if self.spec.satisfies("^[virtuals=mpi] openmpi"):
            env.set("SLURM_MPI_TYPE", "pmix")
        elif self.spec.satisfies("^[virtuals=mpi] mpich"):
            env.set("SLURM_MPI_TYPE", "pmi2")
