"""Findings of `hpcpar doctor`: each states what could be better and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcpar.cli.doctor.facts import JobFacts, by_node
from hpcpar.launch import binding
from hpcpar.units import MiB, format_duration, format_nbytes

OLDEST_TORCH = (2, 5)
SMALL_SHARED_MEMORY_NBYTES = 256 * MiB

LONG_WAIT_S = 10.0
"""Wait for files during imports that is worth a finding; a local disk's first read takes a few seconds."""


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy; a `wrong` one makes the command fail."""

    found: str
    do: str
    wrong: bool = False


def judge(job: JobFacts) -> list[Finding]:
    """Return all findings, the wrong ones first."""
    found = [*_judge_results(job), *_judge_torch(job), *_judge_start(job)]
    found += [*_judge_nodes(job), *_judge_gpus(job), *_judge_imports(job)]
    # torch's thread counts are among the facts, so no finding is inferred from OMP_NUM_THREADS.
    found += [Finding(flaw.found, flaw.do) for flaw in job.rank_map.flaws(sets_threads=True)]
    return sorted(found, key=lambda finding: not finding.wrong)


def _judge_results(job: JobFacts) -> list[Finding]:
    return [
        Finding(
            f"an all-reduce of {format_nbytes(measurement.nbytes)} gave a wrong sum",
            "do not train on this machine: try another MPI library, then ask its administrators",
            wrong=True,
        )
        for measurement in job.measurements
        if not measurement.right
    ]


def _judge_torch(job: JobFacts) -> list[Finding]:
    found = []
    versions = {facts.torch.version for facts in job.ranks}
    for facts in job.ranks[:1]:
        if not facts.torch.version:
            found.append(
                Finding(f"torch cannot be imported: {facts.torch.problem}", "`pip install torch`", wrong=True)
            )
        elif _release(facts.torch.version) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            found.append(
                Finding(f"torch {facts.torch.version} is too old", f"install {oldest} or newer", wrong=True)
            )
    if len(versions) > 1:
        listed = ", ".join(sorted(version or "none" for version in versions))
        found.append(
            Finding(f"ranks have different versions of torch: {listed}", "use one environment", wrong=True)
        )
    for ranks in by_node(job.ranks).values():
        threads = sum(facts.torch.threads for facts in ranks)
        cores = binding.node_cores([facts.cores for facts in ranks])
        if threads > max(cores, len(ranks)):
            found.append(
                Finding(
                    f"torch uses more threads than cores: {threads} on the {cores} of {ranks[0].host}",
                    f"set OMP_NUM_THREADS={suited_threads(job)}",
                )
            )
            break
    return found


def _judge_start(job: JobFacts) -> list[Finding]:
    found = []
    if job.info.hint:
        found.append(Finding(job.info.hint, "start it with srun", wrong=True))
    if job.size == 1 and not job.info.hint:
        found.append(
            Finding(
                "this is one process, so nothing travelled", "`hpcpar run -n 2 -m hpcpar doctor` tries two"
            )
        )
    if job.mpi["thread_level"] in ("single", "funneled"):
        found.append(
            Finding(
                f"MPI allows calls from one thread only ({job.mpi['thread_level']})",
                "leave mpi4py's thread level at its default, or use an MPI that gives THREAD_MULTIPLE",
            )
        )
    return found


def _judge_nodes(job: JobFacts) -> list[Finding]:
    found = []
    for node, ranks in by_node(job.ranks).items():
        if binding.oversubscribed(len(ranks), [facts.cores for facts in ranks]):
            cores = binding.node_cores([facts.cores for facts in ranks])
            found.append(
                Finding(
                    f"{ranks[0].host} (node {node}) has {len(ranks)} ranks on {cores} cores",
                    f"waits give their core away, which costs time; start at most {cores} ranks there, "
                    f"or look at the launcher's binding options",
                )
            )
        room = ranks[0].shared_memory_nbytes
        if len(ranks) > 1 and room is not None and room < SMALL_SHARED_MEMORY_NBYTES:
            found.append(
                Finding(
                    f"/dev/shm on {ranks[0].host} holds {format_nbytes(room)} only",
                    "MPI may fail with 'out of memory'; in a container give it more (--shm-size=1g)",
                )
            )
    return found


def _judge_gpus(job: JobFacts) -> list[Finding]:
    found = []
    for ranks in by_node(job.ranks).values():
        warning = binding.gpu_sharing_warning(ranks[0].torch.gpus, len(ranks))
        if warning:
            found.append(Finding(warning, "one rank per GPU"))
    if any(facts.torch.gpus for facts in job.ranks) and not job.awareness.point_to_point:
        found.append(
            Finding(
                f"there are GPUs, but MPI is not known to take device pointers: {job.awareness.source}",
                job.wheels_advice
                or "what MPI sends from GPUs goes through host memory; load the site's CUDA-aware MPI, or "
                "`pip install hpcpar[cuda13]` (or cuda12) in an environment without another MPI",
            )
        )
    return found


def _judge_imports(job: JobFacts) -> list[Finding]:
    slowest = max(job.ranks, key=lambda facts: facts.start.imported.waited_s)
    waited_s = slowest.start.imported.waited_s
    if waited_s < LONG_WAIT_S:
        return []
    return [
        Finding(
            f"rank {slowest.rank} on {slowest.host} waited {format_duration(waited_s)} for files while it "
            f"imported",
            "every rank reads the whole Python environment: if that lies on a shared file system, "
            "jobscripts/node-local.sh starts the ranks from copies on the nodes' own disks",
        )
    ]


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)"""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def suited_threads(job: JobFacts) -> int:
    """Return the compute threads per rank that suit the fullest node."""
    return min(
        binding.thread_count(len(ranks), [facts.cores for facts in ranks], environ={})
        for ranks in by_node(job.ranks).values()
    )
