"""Schedules with two stages per rank in a V: rank r has stages r and 2p - 1 - r.

Activations go out to the last rank and back. The last stage's backward starts on the rank of the first stage,
so all ranks can begin backwards early. Rows are written as patterns over the rank's two stages, `down` on
the way out and `up` on the way back; the k-th F of a stage is that of microbatch k, and likewise B and W.

                 bubble of rank r, F = B = W         alive on every rank    from
    ZB-V         0                                   2p chunks              m = 2p - 1
    DualPipe-V   (p - 1 - r) F                       2p + 1 chunks          m = 2p

For fewer microbatches the pattern is made for that minimum, and actions of absent microbatches are dropped.

source   ZB-V: Qi, Wan, Amar, Lin 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362;
         DualPipe-V: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.2.1, in the
         form that is "cut in half": stages in a V, each rank's parameters once
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from hpcpar.pipeline_schedules.action import Action, Kind
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.stage_placement import v_shape


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V: no bubble if F = B = W, in the memory that 1F1B takes on its first rank."""
    return _schedule("zb-v", ranks, microbatches, _zb_v, 2 * ranks - 1)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipe-V: a forward and a backward side by side hide each other's messages.

    Side by side are a stage's F and the whole B, after it, of the rank's other stage.
    """
    return _schedule("dualpipe-v", ranks, microbatches, _dualpipe_v, 2 * ranks)


def _zb_v(ranks: int, rank: int, microbatches: int) -> list[str]:
    onward = ranks - rank  # ranks from this one to the turn of the V, both included
    return [
        *["down F"] * (2 * onward - 1),
        *["up F", "down F"] * rank,
        *["up F", "up B", "up W"] * onward,
        *["down F", "down B", "down W", "up F", "up B", "up W"] * (microbatches - ranks - onward + 1),
        *["down B", "down W", "up F", "up B", "up W"] * (onward - 1),
        *["down B", "up B"] * rank,
        *["down B", "down W"] * onward,
        *["up W"] * rank,
        *["down W"] * rank,
    ]


def _dualpipe_v(ranks: int, rank: int, microbatches: int) -> list[str]:
    onward = ranks - rank - 1  # ranks beyond this one
    # The later half of the last backwards are split: their W fill the cool-down.
    last = ["up {}", "down {}"] * (rank + 1)
    whole, split = last[: rank + 1], last[rank + 1 :]
    left = [each.format("W") for each in split] + ["down W"] * onward
    return [
        *["down F"] * (2 * onward),
        *["down F", "up F"] * (rank + 1),
        *["up B", "up W", "up F"] * onward,
        *["down F", "up BW", "up F", "down BW"] * (microbatches - ranks - onward),
        *["up BW", "up F", "down BW"] * onward,
        *[each.format("BW") for each in whole],
        *[each.format("B") for each in split],
        *[each for weights in left[:onward] for each in (weights, "down B")],
        *left[onward:],
    ]


def _schedule(
    name: str, ranks: int, microbatches: int, pattern: Callable[[int, int, int], list[str]], fewest: int
) -> Schedule:
    """Build the rows of a pattern that needs at least `fewest` microbatches."""
    planned = max(fewest, microbatches)
    rows = (
        _numbered(stages, pattern(ranks, rank, planned)) for rank, stages in enumerate(v_shape(ranks).stages)
    )
    return Schedule(
        tuple(tuple(each for each in row if each.microbatch < microbatches) for row in rows), name
    )


def _numbered(stages: tuple[int, ...], pattern: Iterable[str]) -> Iterator[Action]:
    """Number the actions of a pattern of "down F", "up BW" (whole backward), "up B" (split), "up W"."""
    stage_of = dict(zip(("down", "up"), stages, strict=True))
    begun: Counter[tuple[int, str]] = Counter()
    split: dict[int, deque[int]] = {stage: deque() for stage in stages}
    for each in pattern:
        way, what = each.split()
        stage = stage_of[way]
        if what == "W":
            yield Action(stage, "W", split[stage].popleft())
            continue
        kind: Kind = "F" if what == "F" else "B"
        if what == "B":
            split[stage].append(begun[stage, kind])
        yield Action(stage, kind, begun[stage, kind])
        begun[stage, kind] += 1
