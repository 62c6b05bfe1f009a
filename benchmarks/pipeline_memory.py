"""Memory of tensors while a peer works, from what torch's profiler saw of its allocator.

Counted is what autograd keeps for backward, what a B leaves for its W, what is on its way between ranks,
outputs, and what a product needs for a while; not what was there before: parameters, gradients, the
optimizer's states, and what a pipeline keeps from step to step. The hooks by which autograd tells what it
saves would not see what a B leaves for its W.
"""

from __future__ import annotations

import os
from itertools import accumulate

from pipeline_peers import InMicrobatches
from torch.profiler import ProfilerActivity, profile


def live_nbytes(peer: InMicrobatches) -> int:
    """At most during the microbatches of a step, on this rank, of what was made in it. Collective.

    There are gradients already. Of memory of the step before that is let go, as outputs are by torch's
    pipelines, the allocator warns that it does not know the size: it is not counted, neither way.
    """
    if peer.share is None:
        return 0
    peer.run()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts and when it stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        peer.run()
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    levels = list(accumulate((each.nbytes() for each in events), initial=0))
    return max(levels)
