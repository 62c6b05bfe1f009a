"""A part of torch's own distributed tests passes as `outcomes.tsv` says; the whole is run by `run.py`."""

from __future__ import annotations

import pytest

from tests.torch_backend.suites import table
from tests.torch_backend.suites.run import run_tests

PART = (
    "test_all_gather_coalesced_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_sum",
    "test_all_gather_complex",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_broadcast_group",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
    "test_ddp_static_graph_nested_types",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_gather_group",
    "test_irecv",
    "test_reduce_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_undefined_grad_parity_unused_parameters",
)


@pytest.mark.timeout(300)
def test_a_part_of_torchs_tests_passes_as_the_table_says() -> None:
    rows = table.read()
    found = dict(run_tests(3, "hpcpar", list(PART), limit_s=120.0))
    other = {
        name: outcome
        for name, outcome in found.items()
        if outcome["outcome"] != rows[name].outcome("hpcpar", 3)
    }
    assert not other


def test_nothing_that_gloo_passes_fails_without_a_reason() -> None:
    for row in table.read().values():
        assert row.reason or set(row.hpcpar) <= {"passed", "-"}, row
        failed = [
            size
            for size in table.SIZES
            if row.outcome("hpcpar", size) == "failed" and row.outcome("gloo", size) == "passed"
        ]
        assert not failed or any(part in row.test for part in table.BY_HAND), row
