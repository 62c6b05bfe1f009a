"""Fine-tune a causal language model of Hugging Face's transformers in a loop of your own, without a download.

hpcpar run -n 2 python examples/finetune_transformers.py --zero-stage 1     a tiny model, made here
srun python examples/finetune_transformers.py --model /models/llama         a directory of save_pretrained
python examples/finetune_transformers.py                                    on one rank: the same losses

With their Trainer instead: torch_hf_trainer.py.
"""

from __future__ import annotations

import argparse
import inspect
import os
import textwrap
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # compute nodes have no way out; before transformers is imported

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hpcpar
from hpcpar.data import DistributedBatchSampler

IGNORED = -100  # label of a place that has no loss

parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
parser.add_argument("--model", type=Path, help="a directory; without one: a tiny model of bytes")
parser.add_argument("--output", type=Path, default=Path("runs/finetuned"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=16, help="texts of a step, over all ranks")
parser.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2))
args = parser.parse_args()


def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention mask and labels of texts of different lengths: [B, S] each."""
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return tokens, mask, tokens.masked_fill(mask == 0, IGNORED)


world = hpcpar.init()
torch.manual_seed(0)
texts = [line for line in inspect.getsource(textwrap).splitlines() if len(line) > 20]  # stands for yours
tokenizer = None
if args.model and (args.model / "tokenizer.json").exists():
    tokenizer = AutoTokenizer.from_pretrained(args.model)
data = [torch.tensor(tokenizer(text)["input_ids"] if tokenizer else list(text.encode())) for text in texts]
sampler = DistributedBatchSampler(len(data), args.batch, world)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)

if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
hpcpar.broadcast_parameters(model, world)
optimizer = hpcpar.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    model.named_parameters(),
    world,
    zero_stage=args.zero_stage,
    model=model,
)
step = 0
model.train()
while step < args.steps:
    for tokens, mask, labels in loader:
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        targets = labels[:, 1:]
        # The mean over the tokens of all ranks; the model's own loss is the mean over this rank's.
        factor = optimizer.loss_factor((targets != IGNORED).sum())
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        (loss * factor).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance()
        step += 1
        mean = world.allreduce((loss * factor).detach().reshape(1), "average")
        if world.rank == 0:
            print(f"step {step}  loss {mean.item():.6f}", flush=True)
        if step == args.steps:
            break
if world.rank == 0:
    model.save_pretrained(args.output)  # parameters are whole on every rank in stages 0 to 2
    if tokenizer:
        tokenizer.save_pretrained(args.output)
