"""What variables and the library's name say about device pointers."""

from __future__ import annotations

import pytest

from hpcpar.launch.cuda_awareness import cuda_awareness


@pytest.mark.parametrize(
    ("library", "environ", "likely"),
    [
        ("CRAY MPICH version 8", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        ("CRAY MPICH version 8", {}, False),
        ("Intel(R) MPI Library 2021", {"I_MPI_OFFLOAD": "1"}, True),
        ("MVAPICH2 2.3", {}, False),
        ("Open MPI v5", {}, None),
        ("Open MPI v5", {"OMPI_MCA_pml": "ucx"}, None),
        ("MPICH Version: 5", {"MPIR_CVAR_ENABLE_GPU": "0"}, False),
        ("MPICH Version: 5", {}, None),
        ("something", {}, None),
    ],
)
def test_only_a_clear_sign_is_an_answer(library: str, environ: dict[str, str], likely: bool | None) -> None:
    answer = cuda_awareness(library, environ)
    assert answer.likely is likely
    assert answer.why
