"""Lightning's Trainer over MPI (its Fabric: torch_fabric.py).

srun --ntasks-per-node 2 python examples/torch_lightning.py            in an allocation of Slurm
mpiexec -n 2 python examples/torch_lightning.py                        or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_lightning.py   the same over gloo, to compare
"""

import os

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: Lightning takes a group that it finds
size, local_size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
ranks = {"accelerator": "cpu", "strategy": "ddp", "devices": local_size, "num_nodes": size // local_size}


class Network(lightning.LightningModule):
    def configure_model(self) -> None:
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True).sin()).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
batches = DataLoader(TensorDataset(torch.randn(96, 32)), batch_size=96 // size)
trainer = lightning.Trainer(**ranks, max_epochs=20, logger=False, enable_checkpointing=False)
trainer.fit(Network(), batches)
if dist.get_rank() == 0:
    print(f"last loss {trainer.callback_metrics['loss'].item():.8f}")
dist.destroy_process_group()
