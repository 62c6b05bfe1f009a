"""`hpcpar draw tp`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcpar.cli.draw_tp import built
from hpcpar.comm import Communicator, run_loopback
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from hpcpar.planner.shapes import Part
from hpcpar.planner.traffic import Microbatch
from hpcpar.tensor_parallel import TensorParallel
from tests.command import Output

COMMAND = ("draw", "tp")

B, S, H = 2, 16, 32


def test_a_layer_by_hand(output: Output) -> None:
    """Llama-3 8B: h = 4096, 32 heads and 8 of keys and values of 128, F = 14336."""
    told = output("llama3-8b", "--tp", "4").splitlines()
    rows = {line.split()[0]: line for line in told if line.startswith(("self_attn", "mlp"))}
    assert [name.partition(".")[2] for name in rows] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert rows["self_attn.k_proj"].split("  ")[-1].strip() == "[256, 4096]"
    assert rows["mlp.down_proj"].split() == ["mlp.down_proj", "[4096,", "14336]", "row", "[4096,", "3584]"]
    edges = [line.split("  ") for line in told if line.startswith(("attention", "feed-forward"))]
    forward, backward = (
        [[word.strip() for word in edge if word.strip()][place] for edge in edges] for place in (1, 2)
    )
    # bsh values of two bytes are 64 MiB.
    assert forward == 2 * ["identity", "all-reduce 64.0 MiB"]
    assert backward == 2 * ["all-reduce 64.0 MiB", "identity"]
    of_layer = 8 * 8192 * 4096 * 3 / 4 * 2 / 2**20  # 8bsh(t - 1)/t
    assert told[-3].split() == ["the", "layer", f"{of_layer:.1f}", "MiB"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_drawn_is_what_a_layer_sends(size: int, sequence_parallel: bool) -> None:
    config = LlamaConfig(10, H, 3, heads=4, kv_heads=4, ffn_size=64, max_sequence=S, qk_norm="head")
    part = Part(range(1, 2), embeds=False, heads=False)

    def work(comm: Communicator) -> int:
        axis = TensorParallel(comm, sequence_parallel=sequence_parallel)
        layer = Llama(config, parallel_layers(config, axis), part=part).double()
        before = sum(traffic.nbytes_sent() for traffic in comm.traffics().values())
        own = S // size if sequence_parallel else S
        layer(torch.ones(B, own, H, dtype=torch.float64, requires_grad=True)).sum().backward()
        return sum(traffic.nbytes_sent() for traffic in comm.traffics().values()) - before

    (layer,) = built(config, size, Microbatch(B, S), precision="float64", sequence_parallel=sequence_parallel)
    assert size * sum(edge.sent_nbytes for edge in layer.edges) == sum(run_loopback(size, work))


def test_experts_and_shared_heads_are_named(output: Output) -> None:
    told = output("tiny-moe", "--tp", "4", "--sequence-parallel")
    experts = next(line for line in told.splitlines() if line.startswith("mlp.experts.*.gate_proj"))
    assert experts.split("  ")[-1] == " 8 experts"
    assert "[32, 128]" in experts
    assert "each on 2 ranks, which sum its gradients" in told
    assert "attention ḡ       reduce-scatter 64.0 KiB     all-gather 64.0 KiB" in told


def test_the_picture_says_what_the_table_says(output: Output, tmp_path: Path) -> None:
    told = output("tiny", "--tp", "2", "--output", f"{tmp_path}/tp.svg")
    drawn = (tmp_path / "tp.svg").read_text()
    assert drawn.count("all-reduce 64.0 KiB") == told.count("all-reduce 64.0 KiB") == 4
    assert all(f">rank {rank}<" in drawn for rank in range(2))
    assert ">x 352<" in drawn
    output("tiny", "--output", f"{tmp_path}/tp.png")
    assert (tmp_path / "tp.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tiny", "--tp", "3"), "heads=4 does not divide among tp=3 ranks"),
        (("gpt-175b",), "hpcpar plans but does not train"),
        (("tinny",), "did you mean 'tiny'"),
        (("tiny", "--sequence", "30", "--sequence-parallel"), "sequence=30 does not divide among tp=4"),
        (("tiny", "--output", "x.xyz"), "--output x.xyz"),
    ],
)
def test_a_layer_that_cannot_be_drawn_is_refused(
    arguments: tuple[str, ...], words: str, output: Output
) -> None:
    assert words in output(*arguments, status=1)
