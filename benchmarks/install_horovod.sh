#!/usr/bin/env bash
# Real Horovod as a benchmark's peer, in an environment of its own; from the checkout's root:
#
#     bash benchmarks/install_horovod.sh build/horovod
#     python benchmarks/horovod.py --horovod-python build/horovod/bin/python
#     build/horovod/bin/hpcpar run -n 2 benchmarks/training.py
#
# Its last release, 0.28.1, asks for C++14, in which torch's headers do not compile since 2.1. With 17 in its
# place it compiles with the torch of constraints.txt; nothing else of it is changed. It is built for MPI
# alone, against the MPICH wheel. Needs a C++ compiler, make, CMake and some minutes.
set -euo pipefail
environment=$(realpath -m "${1:?usage: bash benchmarks/install_horovod.sh DIRECTORY}")
checkout=$(realpath "$(dirname "$0")/..")
export PIP_CONSTRAINT=$checkout/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

"${PYTHON:-python3}" -m venv "$environment"
export PATH=$environment/bin:$PATH
# hpcpar as well: the models that are trained are its own.
pip install --quiet "${checkout}[mpich,train,examples]" setuptools wheel packaging pyyaml psutil cloudpickle cffi

sources=$(mktemp -d)
trap 'rm -r "$sources"' EXIT
pip download --quiet --no-deps --no-build-isolation --no-binary=:all: --dest "$sources" horovod==0.28.1
tar --extract --gzip --file "$sources"/horovod-*.tar.gz --directory "$sources" --strip-components=1
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$sources"/CMakeLists.txt "$sources"/horovod/torch/CMakeLists.txt
HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS=-j$(nproc) \
    pip install --quiet --no-build-isolation --no-deps "$sources"
python -c 'import horovod.torch as hvd; assert hvd.mpi_built()'
