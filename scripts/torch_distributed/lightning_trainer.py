"""Lightning's Trainer: `mpirun -n 2 mpistrat run scripts/torch_distributed/lightning_trainer.py`."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS = 48, 3
Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {loss:.8f}")


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(480, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = Classifier()
    # What torchrun sets. Without it there is one process.
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    # The Trainer puts a DistributedSampler in: the batch size is one rank's.
    loader = DataLoader(dataset, GLOBAL_BATCH // trainer.world_size, shuffle=True)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
