"""Tables of measured figures in pages of docs/, made from the lines in benchmarks/results/.

A table stands in its page below a comment of HTML, `<!-- table: experts -->`, which names a function here:
`python docs/generate.py` writes it anew.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n\n)(?:\|.*\n)*")

Line = dict[str, Any]

KiB, MiB = 2**10, 2**20


def page(name: str) -> str:
    """Return a page of docs/ with its marked tables made anew; KeyError for one that nobody makes."""
    page = Path(__file__).with_name(name).read_text("utf-8")
    return MARK.sub(lambda found: found[1] + "".join(f"{line}\n" for line in TABLES[found[2]]()), page)


def lines(name: str, **wanted: Any) -> list[Line]:
    """Return the lines of a file that have these values."""
    found = map(json.loads, (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines())
    return [each for each in found if wanted.items() <= each.items()]


def line(name: str, **wanted: Any) -> Line:
    (found,) = lines(name, **wanted)
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table, with so many columns of text on its left."""
    alignment = ["---"] * left + ["---:"] * (len(head) - left)
    return [
        row([*head]),
        "|" + "|".join(alignment) + "|",
        *map(row, rows),
    ]


def row(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def mib(nbytes: float) -> str:
    return f"{nbytes / MiB:,.0f} MiB"


# --- collectives ----------------------------------------------------------------------------------------


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 9.95e-6 else f"{seconds * 1e6:,.0f}"


def beside_mpi(
    name: str, columns: dict[str, tuple[str, str]], sizes: dict[str, tuple[int, ...]], what: str
) -> list[str]:
    """Make a table of ours beside MPI's by size and collective; of the sizes of a row the first there is."""
    timed = {
        (each["collective"], each["place"], each["nbytes"], each["algorithm"]): each["median_s"]
        for each in lines(name)
        if "collective" in each
    }

    def cell(collective: str, place: str, nbytes: tuple[int, ...]) -> str:
        size = next(each for each in nbytes if (collective, place, each, "chosen") in timed)
        return " / ".join(microseconds(timed[collective, place, size, who]) for who in ("chosen", "mpi"))

    rows = ([label, *(cell(*where, nbytes) for where in columns.values())] for label, nbytes in sizes.items())
    return table([what, *columns], rows, left=0)


def collectives() -> list[str]:
    columns = {
        "all-reduce": ("allreduce", "in"),
        "reduce-scatter": ("reduce_scatter", "out"),
        "all-gather": ("allgather", "out"),
        "broadcast": ("broadcast", "in"),
        "all-to-all": ("alltoall", "out"),
    }
    sizes = {"4 B (8 B)": (4, 8), "64 B": (64,)}
    sizes |= {f"{kib} KiB": (kib * KiB,) for kib in (1, 16, 64, 256)}
    sizes |= {f"{mib} MiB": (mib * MiB,) for mib in (1, 4, 16, 64)}
    return beside_mpi("collectives-2", columns, sizes, "ordinary arrays")


def shared_arrays() -> list[str]:
    columns = {
        "all-reduce in place": ("allreduce", "in"),
        "out of place": ("allreduce", "out"),
        "reduce-scatter": ("reduce_scatter", "in"),
        "all-gather": ("allgather", "in"),
        "broadcast": ("broadcast", "in"),
        "all-to-all": ("alltoall", "out"),
    }
    sizes = {"256 KiB": (256 * KiB,), **{f"{mib} MiB": (mib * MiB,) for mib in (1, 4, 16, 64)}}
    return beside_mpi("collectives-2-shared", columns, sizes, "shared arrays")


def wire() -> list[str]:
    collectives = {"all-reduce": "allreduce", "reduce-scatter": "reduce_scatter", "all-gather": "allgather"}
    found = [each for each in lines("wire") if "of_wire" in each]

    def cell(hosts: int, ranks_per_host: int, collective: str, algorithm: str) -> str:
        where = (hosts, ranks_per_host, collective, algorithm)
        keys = ("hosts", "ranks_per_host", "collective", "algorithm")
        of_sizes = {
            each["nbytes"]: each["of_wire"] for each in found if tuple(each[key] for key in keys) == where
        }
        return ", ".join(f"{100 * of_sizes[mib * MiB]:.0f}" for mib in (16, 64))

    def cells(hosts: int, each: int) -> list[str]:
        name = f"{hosts} hosts of {each} rank{'s' if each > 1 else ''}"
        pairs = ((collective, who) for collective in collectives.values() for who in ("chosen", "mpi"))
        return [name, *(cell(hosts, each, *pair) for pair in pairs)]

    head = ["16 MiB, 64 MiB", *(each for name in collectives for each in (name, "MPICH's"))]
    return table(head, (cells(*each) for each in ((2, 1), (2, 2), (4, 1), (4, 2))))


def gpu() -> list[str]:
    def cells(way: str, algorithm: str) -> Iterable[str]:
        for of_host in ("-2-other-host", "-2", "-4"):
            wanted = {"way": way, "algorithm": algorithm, "nbytes": 256 * MiB, "collective": "allreduce"}
            found = line(f"device-collectives{of_host}", **wanted)
            took = found["median_s"]
            yield f"{took * 1e3:.2f} ms" if took < 9.995e-3 else ms(took)
            yield percent(found["of_ring"])

    rows = {
        "`pull`, chosen (direct)": ("pull", "chosen"),
        "`pull`, ring": ("pull", "ring"),
        "`mpi`, chosen (ring)": ("mpi", "chosen"),
        "`mpi`, direct": ("mpi", "direct"),
        "`staged`": ("staged", "chosen"),
        "gloo": ("gloo", "gloo"),
    }
    head = ["2 ranks, quicker host", "of the least time", "2 ranks, slower host", "of it"]
    head += ["4 ranks, slower host", "of it"]
    return table(["way", *head], ([name, *cells(*each)] for name, each in rows.items()))


# --- training -------------------------------------------------------------------------------------------


def data_parallel() -> list[str]:
    def cells(name: str, peer: str) -> list[str]:
        found = line("training-2", model="5m", peer=peer)
        low, _, high = statistics.quantiles(found["step_s"], method="inclusive")
        return [
            *(name, ms(found["median_s"]), f"{low * 1e3:.0f}–{high * 1e3:.0f}", ms(found["median_cpu_s"])),
            *(f"{found['tokens_per_s']:,.0f}", mib(found["shared_nbytes"]), percent(found["efficiency"])),
        ]

    peers = {f"hpcpar, stage {stage}": f"hpcpar {stage}" for stage in range(4)} | {
        "torch 2.13 `DistributedDataParallel` over gloo": "ddp",
        "the same with `ZeroRedundancyOptimizer`": "zero redundancy",
        "torch 2.13 FSDP2 `fully_shard` over gloo": "fsdp2",
        "nothing averaged: `no communication`": "no communication",
    }
    what = "a step of a 4.9 M-parameter Llama, 2 ranks × 4 × 128 tokens, float32, AdamW"
    head = [what, "median", "quartiles", "processor time", "tokens/s", "memory", "efficiency"]
    return table(head, (cells(*each) for each in peers.items()))


def beside_torch() -> list[str]:
    pairs = {
        "0 beside DDP": ("hpcpar 0", "ddp"),
        "1 beside `ZeroRedundancyOptimizer`": ("hpcpar 1", "zero redundancy"),
        "3 beside FSDP2": ("hpcpar 3", "fsdp2"),
    }

    def of(model: str, peer: str) -> Line:
        return line("training-2", model=model, peer=peer, shared_parameters=False)

    def beside(model: str, ours: str, theirs: str) -> str:
        low, middle, high = of(model, ours)["tokens_per_s_ratio_to"][theirs]
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    def bound(model: str, ours: str, theirs: str) -> str:
        return f"{of(model, 'no communication')['tokens_per_s_ratio_to'][theirs][1]:.2f}"

    def both(key: str, unit: float, written: str) -> Callable[[str, str], str]:
        return lambda *peers: written.format(*(of("50m", peer)[key] / unit for peer in peers))

    def alone(ours: str, theirs: str) -> str:
        shared = lines("training-2", model="50m", peer=ours, shared_parameters=True)
        more = f" ({percent(shared[0]['efficiency'])})" if shared else ""
        return percent(of("50m", ours)["efficiency"]) + more

    rows: dict[str, Callable[[str, str], str]] = {
        "4.9 M parameters": lambda *peers: beside("5m", *peers),
        "bound": lambda *peers: bound("5m", *peers),
        "51.8 M (`--model 50m --rounds 6 --steps 2`)": lambda *peers: beside("50m", *peers),
        "bound ": lambda *peers: bound("50m", *peers),
        "51.8 M: step": both("median_s", 1, "{:.2f} / {:.2f} s"),
        "51.8 M: memory": both("shared_nbytes", MiB, "{:,.0f} / {:,.0f} MiB"),
        "51.8 M: of one rank alone (with `--shared-parameters`)": alone,
    }
    cells = ([name.strip(), *(cell(*peers) for peers in pairs.values())] for name, cell in rows.items())
    return table(["", *pairs], cells)


def other_frameworks() -> list[str]:
    pairs = {
        "0, DDP": ("hpcpar 0", "ddp"),
        "0, Horovod": ("hpcpar 0", "horovod"),
        "1, `ZeroRedundancyOptimizer`": ("hpcpar 1", "zero redundancy"),
        "1, DeepSpeed": ("hpcpar 1", "deepspeed 1"),
        "2, DeepSpeed": ("hpcpar 2", "deepspeed 2"),
        "3, FSDP2": ("hpcpar 3", "fsdp2"),
        "3, DeepSpeed": ("hpcpar 3", "deepspeed 3"),
    }
    rows = {
        "4.9 M, float32": ("5m", "float32"),
        "4.9 M, bfloat16": ("5m", "bfloat16"),
        "51.8 M, float32, in two calls": ("50m", "float32"),
        "51.8 M, bfloat16": ("50m", "bfloat16"),
    }

    def cell(model: str, dtype: str, ours: str, theirs: str) -> str:
        found = lines("training-2-peers", model=model, dtype=dtype, peer=ours)
        ratios = (each["tokens_per_s_ratio_to"] for each in found)
        return f"{next(each[theirs][1] for each in ratios if theirs in each):.2f}"

    cells = ([name, *(cell(*row, *pair) for pair in pairs.values())] for name, row in rows.items())
    return table(["", *pairs], cells)


def zero_memory() -> list[str]:
    def cells(stage: int) -> list[str]:
        found = line("zero-memory-4", variant="plain", stage=stage)
        rank = found["worst"]
        own = rank["peak_staging_nbytes"] + rank["peak_gathered_nbytes"]
        figures = (rank["state_nbytes"], own, rank["peak_activations_nbytes"], max(found["added_nbytes"]))
        return [str(stage), found["formula"], *(f"{each / MiB:.1f} MiB" if each else "" for each in figures)]

    head = ["stage", "formula", "kept", "a step's own, beyond it", "activations", "the processes grew by"]
    return table(head, map(cells, range(4)), left=2)


def tensor_parallel() -> list[str]:
    columns = {
        "no sequence parallelism": ("hpcpar tp", "dtensor tp"),
        "overlap off": ("hpcpar tp no overlap", "dtensor tp"),
        "sequence parallelism": ("hpcpar tp+sp", "dtensor tp+sp"),
        "in 2 chunks": ("hpcpar tp+sp 2 chunks", "dtensor tp+sp"),
        "free": ("no communication", "dtensor tp"),
        "of free": ("hpcpar tp", "no communication"),
        "of one process": ("hpcpar tp", "one process"),
    }
    written = {"of free": percent, "of one process": "{:.2f} ×".format}

    def cells(hidden: int, forward_only: bool) -> list[str]:
        of_peers = {
            each["peer"]: each for each in lines("training-tp-2", hidden=hidden, forward_only=forward_only)
        }
        ratios = {
            name: of_peers[peer]["tokens_per_s_ratio_to"][other][1] for name, (peer, other) in columns.items()
        }
        first = ["", "forward"] if forward_only else [f"{hidden:,}", "training"]
        return [*first, *(written.get(name, "{:.2f}".format)(ratio) for name, ratio in ratios.items())]

    rows = (cells(hidden, forward_only) for hidden in (256, 512, 1024) for forward_only in (False, True))
    return table(["hidden size", "", *columns], rows, left=2)


def tensor_parallel_degree() -> list[str]:
    def cells(degree: int) -> list[str]:
        jobs = lines("fsdp-tp-4", tp=degree)
        middle = {key: statistics.median(job[key] for job in jobs) for key in jobs[0] if key in columns}
        return [str(degree), *(write(middle[key]) for key, (_, write) in columns.items())]

    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "median_s": ("step", "{:.2f} s".format),
        "tokens_per_s": ("tokens/s", "{:,.0f}".format),
        "activations_nbytes": ("activations of a rank", mib),
        "added_nbytes": ("memory of a rank, beyond the start", mib),
    }
    return table(["tp", *(title for title, _ in columns.values())], map(cells, (1, 2, 4)), left=0)


def context() -> list[str]:
    peers = {
        "`exchange`": "hpcpar exchange",
        "zigzag ring over gloo": "zigzag ring",
        "Ulysses over gloo": "ulysses",
        "one process with whole sequences": "one process",
        "no communication": "no communication",
    }
    rows = (
        [name, *(ms(line("context-2", peer=peer, sequence=each)["median_cpu_s"]) for each in (128, 2048))]
        for name, peer in peers.items()
    )
    return table(["processor time of a rank", "8 sequences of 128", "1 of 2048"], rows)


def experts() -> list[str]:
    peers = {
        "hpcpar, 4 of 8 experts on each rank": "hpcpar ep",
        "the same in two halves": "hpcpar ep halves",
        "torch DDP over gloo, 8 experts on each": "ddp",
        "Megatron-Core's mixture over gloo": "megatron ep",
        "DeepSpeed's mixture over gloo": "deepspeed ep",
        "one process, 8 experts": "one process",
        "no communication": "no communication",
    }
    found = ((name, line("experts-2", peer=peer)) for name, peer in peers.items())
    rows = (
        [name, ms(each["median_s"]), ms(each["median_cpu_s"]), mib(each["peak_nbytes"])]
        for name, each in found
    )
    return table(["two ranks", "step", "processor time of a rank", "memory"], rows)


# --- pipelines ------------------------------------------------------------------------------------------


SCHEDULES = (
    *("naive", "gpipe", "1f1b", "eager-1f1b", "interleaved"),
    *("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "automatic"),
)


def bubbles(
    name: str, by: str, rows: dict[str, int], priced: Callable[[Line], float], what: str
) -> list[str]:
    """Make a table of bubble rates in per cent, as priced and as measured, by schedule."""
    found = {(each[by], each["schedule"]): each for each in lines(name)}
    schedules = [each for each in SCHEDULES if what.startswith("priced") or each != "eager-1f1b"]

    def cell(place: int, schedule: str) -> str:
        each = found[place, schedule]
        return f"{100 * abs(priced(each)):.1f} / {100 * each['bubble_rate']:.1f}"

    cells = ([label, *(cell(place, each) for each in schedules)] for label, place in rows.items())
    return table([what, *schedules], cells)


def sleeping_pipelines() -> list[str]:
    rows = {f"{ranks} ranks": ranks for ranks in (2, 4)}
    title = "bubble rate, priced / measured"
    return bubbles("pipeline-sleep", "ranks", rows, lambda each: each["predicted_bubble_rate"], title)


def layer_pipelines() -> list[str]:
    rows = {f"hidden {hidden}": hidden for hidden in (512, 256)}
    title = "priced / measured"
    return bubbles(
        "pipeline-layers-2", "hidden", rows, lambda each: statistics.median(each["own_rates"]), title
    )


def torch_pipelines() -> list[str]:
    schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")

    def rows(hidden: int, vocabulary: int) -> Iterable[list[str]]:
        found = {
            each["peer"]: each for each in lines("pipeline-peers-2", hidden=hidden, vocabulary=vocabulary)
        }
        pairs = [(found[f"hpcpar {each}"], f"torch {each}") for each in schedules]
        ratios = (f"{ours['tokens_per_s_ratio_to'][theirs][1]:.2f}" for ours, theirs in pairs)
        yield [f"hidden {hidden}, vocabulary {vocabulary:,}", *ratios]
        live = [
            f"{max(ours['live_nbytes']) / MiB:.0f} / {max(found[theirs]['live_nbytes']) / MiB:.0f}"
            for ours, theirs in pairs
        ]
        yield ["", f"{live[0]} MiB", *live[1:]]

    models = ((512, 16384), (512, 12288), (256, 8192))
    what = "tokens/s beside torch's; memory of a rank during the microbatches, ours / torch's"
    return table([what, *schedules], (row for model in models for row in rows(*model)))


# --- Horovod, Keras and torch.distributed ---------------------------------------------------------------


def horovod() -> list[str]:
    cases = {
        "synchronous all-reduce of 1 KiB": "sync",
        "64 all-reduces of 64 KiB, started, then awaited": "async",
        "step of a Llama of 4.9 M parameters": "llama",
        "step of ResNet-20": "resnet",
    }
    libraries = {
        "ours": "hpcpar",
        "Horovod 0.28.1": "horovod",
        "with `HOROVOD_CYCLE_TIME=0`": "horovod, cycle time 0",
    }
    peers = {"gloo": "gloo", "DDP over gloo": "ddp", "no communication": "alone"}

    def duration(seconds: float) -> str:
        if seconds < 1e-3:
            return f"{seconds * 1e6:.0f} µs"
        return f"{seconds * 1e3:.{0 if seconds > 9.95e-3 else 1}f} ms"

    def cell(case: str, library: str) -> str:
        found = line("horovod-2", case=case, library=library, peer="hvd")
        low, middle, high = (
            duration(each) for each in statistics.quantiles(found["seconds"], method="inclusive")
        )
        unit = middle.rpartition(" ")[2]
        return f"{middle} ({low.removesuffix(f' {unit}')} to {high.removesuffix(f' {unit}')})"

    def beside(case: str) -> str:
        found = {each["peer"]: each for each in lines("horovod-2", case=case, library="hpcpar")}
        return ", ".join(
            f"{name} {duration(found[peer]['median_s'])}" for name, peer in peers.items() if peer in found
        )

    rows = (
        [name, *(cell(case, each) for each in libraries.values()), beside(case)]
        for name, case in cases.items()
    )
    return table(["", *libraries, "beside ours"], rows)


def keras() -> list[str]:
    cases = {"transformer": "transformer", "MLP, half of whose step is the optimizer": "mlp"}

    def cells(name: str, case: str) -> list[str]:
        of = {each["player"]: each["ratio"][1] for each in lines("keras-step-2", case=case)}
        return [name, f"{of['hpcpar']:.2f}", f"{1 + of['copy'] + of['allreduce']:.2f}"]

    head = ["", "step", "bare copy into buckets and bare all-reduce"]
    return table(head, (cells(*each) for each in cases.items()))


def torch_backend() -> list[str]:
    cases = {
        "DDP, a step, 5M parameters": "ddp-5M",
        "DDP, a step, 50M parameters": "ddp-50M",
        "FSDP2, a step, 5M parameters": "fsdp2-5M",
        "DTensor, tp 2, forward and backward": "tp",
        "`all_reduce` of 8 B": "8B",
        "`all_reduce` of 64 MiB": "64MiB",
    }

    def duration(milliseconds: float) -> str:
        return f"{1e3 * milliseconds:.0f} µs" if milliseconds < 1 else f"{milliseconds:.3g} ms"

    def cells(name: str, case: str) -> list[str]:
        ours, gloo, free = (
            line("torch-backend-2", case=case, player=player) for player in ("hpcpar", "gloo", "fake")
        )
        ratios = (f"{gloo[key][1]:.2f}" for key in ("ratio", "cpu_ratio"))
        least = "" if case == "64MiB" else duration(free["ms"][1])
        return [name, duration(ours["ms"][1]), duration(gloo["ms"][1]), *ratios, least]

    head = ["", "hpcpar", "gloo", "× gloo", "processor time ×", "without communication"]
    return table(head, (cells(*each) for each in cases.items()))


TABLES: dict[str, Callable[[], list[str]]] = {
    name.replace("_", "-"): function
    for name, function in {
        **{each.__name__: each for each in (collectives, shared_arrays, data_parallel, tensor_parallel)},
        **{each.__name__: each for each in (tensor_parallel_degree, context, experts)},
        **{each.__name__: each for each in (sleeping_pipelines, layer_pipelines, torch_backend)},
        **{each.__name__: each for each in (beside_torch, other_frameworks, torch_pipelines, keras)},
        **{each.__name__: each for each in (wire, gpu, zero_memory, horovod)},
    }.items()
}
"""By their names in the pages."""
