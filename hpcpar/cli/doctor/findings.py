"""Findings of `hpcpar doctor`: each states what could be better and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpar.cli.doctor.facts import JobFacts, by_node
from hpcpar.launch import binding
from hpcpar.launch.rank_map import Finding
from hpcpar.units import MiB, format_duration, format_nbytes

OLDEST_TORCH = (2, 5)
SMALL_SHARED_MEMORY_NBYTES = 256 * MiB

LONG_WAIT_S = 10.0
"""Wait for files during imports that is worth a finding; a local disk's first read takes a few seconds."""


def judge(job: JobFacts) -> list[Finding]:
    """Return all findings, the wrong ones first."""
    found = [*_judge_results(job), *_judge_torch(job), *_judge_start(job)]
    found += [*_judge_nodes(job), *_judge_gpus(job), *_judge_imports(job)]
    # torch's thread counts are among the facts, so no finding is inferred from OMP_NUM_THREADS.
    found += job.rank_map.flaws(sets_threads=True)
    return sorted(found, key=lambda finding: not finding.wrong)


def _judge_results(job: JobFacts) -> Iterator[Finding]:
    do = "do not train on this machine: try another MPI library, then ask its administrators"
    for measurement in job.measurements:
        if not measurement.right:
            found = f"an all-reduce of {format_nbytes(measurement.nbytes)} gave a wrong sum"
            yield Finding(found, do, wrong=True)


def _judge_torch(job: JobFacts) -> Iterator[Finding]:
    first = job.ranks[0].torch
    if not first.version:
        yield Finding(f"torch cannot be imported: {first.problem}", "`pip install torch`", wrong=True)
    elif _release(first.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding(f"torch {first.version} is too old", f"install {oldest} or newer", wrong=True)
    versions = {facts.torch.version for facts in job.ranks}
    if len(versions) > 1:
        listed = ", ".join(sorted(version or "none" for version in versions))
        yield Finding(f"ranks have different versions of torch: {listed}", "use one environment", wrong=True)
    for ranks in by_node(job.ranks).values():
        threads = sum(facts.torch.threads for facts in ranks)
        cores = binding.node_cores([facts.place.cores for facts in ranks])
        if threads > max(cores, len(ranks)):
            found = f"torch uses more threads than cores: {threads} on the {cores} of {ranks[0].host}"
            yield Finding(found, f"set OMP_NUM_THREADS={suited_threads(job)}")
            return


def _judge_start(job: JobFacts) -> Iterator[Finding]:
    if job.info.hint:
        found, _, do = job.info.hint.partition("; ")
        yield Finding(found, do, wrong=True)
    elif job.size == 1:
        do = "`hpcpar run -n 2 -m hpcpar doctor` tries two"
        yield Finding("this is one process, so nothing travelled", do)
    if job.mpi["thread_level"] in ("single", "funneled"):
        yield Finding(
            f"MPI allows calls from one thread only ({job.mpi['thread_level']})",
            "leave mpi4py's thread level at its default, or use an MPI that gives THREAD_MULTIPLE",
        )


def _judge_nodes(job: JobFacts) -> Iterator[Finding]:
    for node, ranks in by_node(job.ranks).items():
        cores = binding.node_cores([facts.place.cores for facts in ranks])
        if len(ranks) > cores:
            yield Finding(
                f"{ranks[0].host} (node {node}) has {len(ranks)} ranks on {cores} cores",
                f"waits give their core away, which costs time; start at most {cores} ranks there, "
                f"or look at the launcher's binding options",
            )
        room = ranks[0].shared_memory_nbytes
        if len(ranks) > 1 and room is not None and room < SMALL_SHARED_MEMORY_NBYTES:
            yield Finding(
                f"/dev/shm on {ranks[0].host} holds {format_nbytes(room)} only",
                "MPI may fail with 'out of memory'; in a container give it more (--shm-size=1g)",
            )


def _judge_gpus(job: JobFacts) -> Iterator[Finding]:
    for ranks in by_node(job.ranks).values():
        taken = [facts.gpu for facts in ranks]
        warning = binding.gpu_sharing_warning(ranks[0].torch.gpus, len(ranks), taken if all(taken) else None)
        if warning:
            yield Finding(warning, "one rank per GPU")
    if any(facts.torch.gpus for facts in job.ranks) and not job.awareness.point_to_point:
        yield Finding(
            f"there are GPUs, but MPI is not known to take device pointers: {job.awareness.source}",
            job.wheels_advice
            or "what MPI sends from GPUs goes through host memory; load the site's CUDA-aware MPI, or "
            "`pip install hpcpar[cuda13]` (or cuda12) in an environment without another MPI",
        )


def _judge_imports(job: JobFacts) -> Iterator[Finding]:
    slowest = max(job.ranks, key=lambda facts: facts.start.imported.waited_s)
    waited_s = slowest.start.imported.waited_s
    if waited_s >= LONG_WAIT_S:
        yield Finding(
            f"rank {slowest.rank} on {slowest.host} waited {format_duration(waited_s)} for files while it "
            f"imported",
            "every rank reads the whole Python environment: if that lies on a shared file system, "
            "jobscripts/node-local.sh starts the ranks from copies on the nodes' own disks",
        )


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)"""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def suited_threads(job: JobFacts) -> int:
    """Return the compute threads per rank that suit the fullest node."""
    return min(
        binding.thread_count(len(ranks), [facts.place.cores for facts in ranks], environ={})
        for ranks in by_node(job.ranks).values()
    )
