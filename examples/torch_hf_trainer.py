"""Hugging Face's Trainer over MPI: DDP, and with the word `fsdp` parameters divided among the ranks.

srun python examples/torch_hf_trainer.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_hf_trainer.py fsdp                    or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_hf_trainer.py    the same over gloo, to compare
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: the Trainer takes a group that it finds

torch.manual_seed(0)
tokens = torch.arange(96 * 16).view(96, 16) ** 2 % 61
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2}} if "fsdp" in sys.argv else {}
arguments = TrainingArguments(
    "runs/hf_trainer",
    use_cpu=True,
    per_device_train_batch_size=24 // dist.get_world_size(),
    max_steps=20,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    **fsdp,
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if dist.get_rank() == 0:
    print(f"last loss {losses[-1]:.8f}")
dist.destroy_process_group()
