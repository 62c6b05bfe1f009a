# hpcpar for CPUs, over Debian's Open MPI:
#
#     docker build -t hpcpar .
#     docker run --rm --shm-size=1g hpcpar                                               # a few steps on two ranks
#     docker run --rm --shm-size=1g -v "$PWD:/work" -w /work hpcpar hpcpar run -n 2 train.py
#
# torch's default wheel brings CUDA. For the smaller one name PyTorch's index of CPU builds:
# --build-arg PIP_ARGS="--extra-index-url <index>". On a cluster: jobscripts/hpcpar.def, or this image by
# Apptainer and `srun --mpi=pmix` (docs/install.md).
FROM python:3.11-slim-bookworm

ARG PIP_ARGS=
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin && rm -rf /var/lib/apt/lists/*
COPY setup.py pyproject.toml README.md LICENSE constraints.txt /opt/hpcpar/
COPY hpcpar /opt/hpcpar/hpcpar
COPY examples /opt/hpcpar/examples
RUN PIP_CONSTRAINT=/opt/hpcpar/constraints.txt pip install --no-cache-dir $PIP_ARGS '/opt/hpcpar[train,horovod]'

# Docker keeps ranks from each other's memory, of which this Open MPI would warn; hpcpar finds out by itself.
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none

RUN useradd --create-home hpcpar
USER hpcpar
WORKDIR /home/hpcpar
RUN hpcpar example tiny.toml
CMD ["hpcpar", "run", "-n", "2", "--", "-m", "hpcpar", "train", "tiny.toml", "train.steps=20"]
