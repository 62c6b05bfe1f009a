"""Memory that a step of a peer of benchmarks/training.py allocates beside its parameters and their states."""

from __future__ import annotations

import gc

from torch.profiler import ProfilerActivity, profile
from training_peers import ADAMW, Task, build

from hpcpar.data_parallel import watch_activations


def activation_nbytes(name: str, task: Task) -> tuple[int | None, int | None]:
    """Untimed: what autograd saves at most for backward, and what torch allocates at most; collective.

    Of the rank that needs most; in forward and backward of a second step, above what the first left behind.
    Allocated are all tensors: what is saved, temporary, under way to other ranks, summed up, and gradients.
    """
    peer = build(name, task, ADAMW)
    found = 0, 0
    if peer.share is not None:
        peer.step()
        peer.settle()
        gc.collect()
        with watch_activations(peer.model) as saved:
            peer.backward(peer.forward())
        peer.synchronize()
        peer.update()
        peer.settle()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            peer.backward(peer.forward())
        found = saved.peak_nbytes, allocated_nbytes(profiled)
        peer.synchronize()
    everyone = task.world.allgather_object(found)
    return max(saved for saved, _ in everyone), max(allocated for _, allocated in everyone)


def allocated_nbytes(profiled: profile) -> int:
    """Return the most bytes that torch's allocator had given at once and not got back."""
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most
