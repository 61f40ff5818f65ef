"""Lightning's Trainer inside a replica: `mpirun -n 2 python scripts/frameworks/lightning_fit.py`."""

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

GLOBAL_BATCH, EPOCHS = 48, 3
Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_end(self) -> None:
        strategy = ms.get_strategy()
        loss = self.trainer.callback_metrics["loss"]  # this rank's
        loss = strategy.reduce(ms.ReduceOp.MEAN, loss, axis=None)
        strategy.print(f"epoch {self.current_epoch}: loss {loss:.8f}")


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(480, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = Classifier()
    trainer = lightning.Trainer(
        devices=1,
        plugins=LightningEnvironment(),  # one process of its own, whatever Slurm and MPI say
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,  # otherwise strategy.is_first
        enable_model_summary=strategy.is_first,
    )
    loader = DataLoader(dataset, GLOBAL_BATCH, shuffle=True)
    model, loader = strategy.prepare(model, loader)
    trainer.fit(model, loader)
    strategy.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
