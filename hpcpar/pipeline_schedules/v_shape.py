"""Schedules of two stages per rank in a V: rank r has stages r and 2p - 1 - r.

The way through the ranks leads out and back, so the last stage's backward starts where the first stage is,
and all ranks can begin backwards early. Rows are written as patterns over the rank's two stages, `down` on
the way out and `up` on the way back; the k-th F of a stage is that of microbatch k, and likewise B and W.

                 idle on rank r's span, F = B = W    alive on every rank    from
    ZB-V         0                                   2p chunks              m = 2p - 1
    DualPipe-V   (p - 1 - r) F                       2p + 1 chunks          m = 2p

For fewer microbatches the pattern is made for so many, and those that there are not are left out.

source   ZB-V: Qi, Wan, Amar, Lin 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362;
         DualPipe-V: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.2.1, in the
         form that is "cut in half": stages in a V, each rank's parameters once
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from hpcpar.pipeline_schedules.action import Action, Kind
from hpcpar.pipeline_schedules.placement import v_shape
from hpcpar.pipeline_schedules.schedule import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No idle time if F = B = W, in the memory that 1F1B takes on its first rank."""
    return _schedule("zb-v", ranks, microbatches, _zb_v, 2 * ranks - 1)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Forward and backward of two microbatches side by side, so that one's messages hide behind the other.

    Side by side are a stage's F and the whole B of the rank's other stage that comes after it.
    """
    return _schedule("dualpipe-v", ranks, microbatches, _dualpipe_v, 2 * ranks)


def _zb_v(ranks: int, rank: int, microbatches: int) -> list[str]:
    onward = ranks - rank  # from this rank to the turn of the V, both included
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
    # Of the last backwards on the way in, the later half are split: their W fill the time that is left.
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
    """The rows that a pattern gives, which is made for at least `fewest` microbatches."""
    planned = max(fewest, microbatches)
    rows = (
        _numbered(stages, pattern(ranks, rank, planned)) for rank, stages in enumerate(v_shape(ranks).stages)
    )
    return Schedule(
        tuple(tuple(each for each in row if each.microbatch < microbatches) for row in rows), name
    )


def _numbered(stages: tuple[int, ...], pattern: Iterable[str]) -> Iterator[Action]:
    """The actions of a pattern of "down F", "up BW" (a whole backward), "up B" (a split one) and "up W"."""
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
