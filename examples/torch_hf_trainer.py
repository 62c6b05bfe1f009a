"""Hugging Face's Trainer over MPI: DDP, and on GPUs with the word fsdp parameters divided among the ranks.

srun python examples/torch_hf_trainer.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_hf_trainer.py                         or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_hf_trainer.py    the same over gloo, to compare
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

has_gpu, fsdp = torch.cuda.is_available(), "fsdp" in sys.argv
if fsdp and not has_gpu:
    sys.exit("fsdp: Accelerate, which the Trainer uses, has it on GPUs alone; on CPUs take torch_fsdp2.py")
dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: the Trainer takes a group that it finds

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
arguments = TrainingArguments(
    "runs/hf_trainer",
    use_cpu=not has_gpu,
    fsdp=fsdp or None,
    per_device_train_batch_size=24 // dist.get_world_size(),
    max_steps=20,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
data = [{"input_ids": row, "labels": row} for row in torch.arange(96 * 16).view(96, 16) ** 2 % 61]
trainer = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)), arguments, train_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"last loss {losses[-1]:.8f}")
dist.destroy_process_group()
