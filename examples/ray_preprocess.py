"""Clean text on all nodes of a Ray cluster, for training to read: data.paths=OUTPUT.

python examples/ray_preprocess.py --output runs/text        on this machine alone
sbatch jobscripts/ray-preprocess.sh                         on all nodes of a Slurm job, and then train on it

Files are dealt out in shards. A task reads a shard, puts its text in order (one form of Unicode and of line
ends, no trailing blanks, no more than two empty lines in a row), leaves out what is too short, and writes a
JSONL file, a document a line. What two shards have alike is kept once: tasks tell the hashes of their
documents, and a copy of an earlier shard's document is taken out again.

Without --source the text is Python's own standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import socket
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ENDINGS = (".txt", ".md", ".rst", ".py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Clean text with Ray.")
    parser.add_argument("--output", type=Path, required=True, help="directory that all nodes see")
    parser.add_argument("--source", type=Path, help="directory of text (default: the standard library's)")
    parser.add_argument("--max-files", type=int, default=400, help="(default: 400)")
    parser.add_argument("--shards", type=int, default=16, help="files to write, tasks to do (default: 16)")
    parser.add_argument(
        "--shortest", type=int, default=200, help="letters that a document has (default: 200)"
    )
    return parser.parse_args()


def cleaned(text: str) -> str:
    lines = (line.rstrip() for line in unicodedata.normalize("NFC", text).splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()


def write(path: Path, documents: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@ray.remote(num_cpus=1)
def clean(files: Sequence[Path], shard: Path, shortest: int) -> tuple[str, list[str]]:
    """Write a shard; the node that did it, and the hashes of its documents."""
    texts = (cleaned(file.read_text(encoding="utf-8", errors="replace")) for file in files)
    documents = list(dict.fromkeys(text for text in texts if len(text) >= shortest))
    write(shard, documents)
    return socket.gethostname(), [digest(text) for text in documents]


@ray.remote(num_cpus=1)
def leave_out(copies: frozenset[str], shard: Path) -> None:
    write(shard, [text for text in read(shard) if digest(text) not in copies])


def in_turn_on_all_nodes() -> Iterator[NodeAffinitySchedulingStrategy]:
    """For tasks one after the other; a node that is lost is done without (soft).

    Ray by itself, SPREAD too, leaves a short job to the node whose workers are up first.
    """
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return itertools.cycle(NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes)


def copies_in(shards: Sequence[Sequence[str]]) -> list[frozenset[str]]:
    """Of each shard the hashes that an earlier one has as well."""
    seen: set[str] = set()
    found = []
    for hashes in shards:
        found.append(frozenset(seen.intersection(hashes)))
        seen.update(hashes)
    return found


def main() -> None:
    options = arguments()
    source = options.source or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file())
    files = [path for path in files if "site-packages" not in path.parts][: options.max_files]
    if not files:
        raise SystemExit(f"no file in {source} ends in {' '.join(ENDINGS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    shards = [options.output.absolute() / f"shard-{i:05d}.jsonl" for i in range(options.shards)]

    ray.init(logging_level="warning")  # joins the cluster that RAY_ADDRESS names, or starts one here
    everywhere = in_turn_on_all_nodes()
    tasks = [
        clean.options(scheduling_strategy=next(everywhere)).remote(
            files[i :: options.shards], shard, options.shortest
        )
        for i, shard in enumerate(shards)
    ]
    done = ray.get(tasks)
    copies = copies_in([hashes for _, hashes in done])
    ray.get([leave_out.remote(found, shard) for found, shard in zip(copies, shards, strict=True) if found])

    for node, count in sorted(Counter(node for node, _ in done).items()):
        print(f"{node} cleaned {count} shards")
    kept = sum(len(hashes) for _, hashes in done) - sum(map(len, copies))
    print(f"{kept} documents of {len(files)} files are in {options.output}", flush=True)


if __name__ == "__main__":
    main()
