"""Programs as the planner sees them: what their layers read, write, keep and overlap.

A plan is for hpcpar; rows that others measured are predicted with what their program did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcpar.planner.cluster import Device
from hpcpar.planner.layout import Layout
from hpcpar.units import MiB


@dataclass(frozen=True)
class Software:
    """Bytes, kernels and overlap that a training program's implementation adds to the model's arithmetic.

    fused_attention   scores are never written to memory (FlashAttention); masked blocks are skipped
    whole             elementwise bytes of a layer's forward for each value of [T, H], on every tp rank unless
                      sequence parallel: norms, residual, dropout
    split             the same, which tp divides: transposes, activation function, in units of [T, H]
    scores            bytes of softmax and its dropout for each score, without fused attention
    unfused_softmax   factor on that where the fused kernel does not take the number of heads
    softmax_kernels   launches that this adds
    selective         what selective recomputation recomputes: the "attention" core; or every second matrix
                      "product" and what is elementwise (torchtitan's operator-wise checkpointing)
    kernels           launches of a layer's forward
    backward_kernels  launches of its backward, in units of the forward's
    expert_kernels    launches of one expert's forward, beyond those of a dense feed-forward
    routing_kernels   launches of a mixture's forward for router, order of rows and sums over slots
    expert_load       rows of the rank with most, over the mean of the ranks that share a mixture's experts
    rows_moved        reads and writes of rows [T·k, H] in a mixture's forward, beside its products
    call_kernels      launches' time that the host spends on one collective or message
    step_kernels      the same, on what is done once a step: optimizer, agreements, reading of tokens
    launch_s          of the host for one launch, in the interpreter and the library; the device's at least
    head_rate         share of the layers' rate that the output projection reaches
    logits            elementwise bytes of loss and its backward for each logit
    overlap           share of the backward behind which gradients are reduced; 0 = after it
    hides_messages    the pipeline's messages travel while both ranks compute
    scatters_messages each tp rank sends its part of a message, which is gathered inside the node
    step_s            more that the host does once a step
    gradient_bytes    of one gradient in memory and on the links
    moment_dtype      type of the optimizer's moments; None = as the master weights
    float32_parameters   parameters are kept in float32 and rounded when they are gathered
    keeps_messages    the pipeline keeps a stage's outputs until their backward, and has memory for the inputs
                      and the gradients of all microbatches
    gathered_in_pipeline   with pp, ZeRO-3 gathers and reduces once a step: parameters stay gathered and
                      gradients whole until the last microbatch
    logit_bytes       bytes for each logit: logits, their float32 copy, the gradient
    workspace_nbytes  of libraries and communication buffers
    causal_mfu        the MFU counts only scores that the mask leaves
    """

    name: str
    fused_attention: bool = True
    whole: float = 18.0
    split: float = 24.0
    scores: float = 12.0
    unfused_softmax: float = 2.5
    selective: Literal["attention", "product"] = "attention"
    softmax_kernels: float = 8
    kernels: float = 20
    backward_kernels: float = 1.0
    expert_kernels: float = 5
    routing_kernels: float = 15
    expert_load: float = 1.0
    rows_moved: float = 11
    call_kernels: float = 0
    step_kernels: float = 0
    launch_s: float = 0.0
    head_rate: float = 1.0
    logits: float = 20.0
    overlap: float = 0.9
    hides_messages: bool = True
    scatters_messages: bool = False
    step_s: float = 0.0
    gradient_bytes: int | None = None
    moment_dtype: str | None = None
    float32_parameters: bool = False
    keeps_messages: bool = False
    gathered_in_pipeline: bool = False
    logit_bytes: int = 8
    workspace_nbytes: int = 0
    causal_mfu: bool = False

    def rows_over_mean(self, layout: Layout) -> float:
        """Return the rows of the experts of the rank with most, over the mean of the ranks."""
        return min(self.expert_load, float(layout.ep))

    def launches_s(self, device: Device, kernels: float) -> float:
        """Return what so many launches take."""
        return kernels * max(device.launch_s, self.launch_s)

    def calls_s(self, device: Device, calls: float) -> float:
        """Return what the host needs for so many collectives or messages.

        Ranks that share a core wait in each of them for the others' turns.
        """
        return self.launches_s(device, self.call_kernels * calls * device.ranks_per_core)


HPCPAR = Software("hpcpar", call_kernels=13, step_kernels=900, workspace_nbytes=18 * MiB)

SOFTWARE = {
    each.name: each
    for each in (
        HPCPAR,
        Software(
            "megatron-deepspeed",
            fused_attention=False,
            kernels=26,
            launch_s=30e-6,
            step_s=5e-3,
            overlap=0.0,
            hides_messages=False,
            scatters_messages=True,
            gradient_bytes=2,
        ),
        Software(
            "megatron",
            fused_attention=False,
            kernels=24,
            launch_s=10e-6,
            overlap=0.0,
            hides_messages=False,
            scatters_messages=True,
            gradient_bytes=4,
        ),
        Software("llama3", kernels=18, gradient_bytes=4, causal_mfu=True),
        Software(
            "torchtitan",
            split=60.0,
            selective="product",
            kernels=18,
            gradient_bytes=4,
            float32_parameters=True,
            keeps_messages=True,
            gathered_in_pipeline=True,
            logit_bytes=14,
        ),
    )
}
"""Programs by name."""
