"""What timm's train.py does, inside a replica: `mpirun -n 2 python scripts/frameworks/timm_loop.py`."""

import timm
import torch
from timm import data, optim, scheduler, utils
from torch import nn

import mpistrat as ms

GLOBAL_BATCH, EPOCHS, CLASSES, SIZE = 48, 8, 4, 32


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    transform = None  # create_loader puts one here, for images of PIL

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        return noise + index % CLASSES, index % CLASSES


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    utils.random_seed(0, rank=0)
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes)
    options = {"use_prefetcher": False, "num_workers": 0}  # and distributed=False
    loader = data.create_loader(Images(), (3, SIZE, SIZE), GLOBAL_BATCH, True, **options)
    model, loader = strategy.prepare(model, loader)
    optimizer = optim.create_optimizer_v2(model, opt="adamw", lr=1e-2)
    averaged = utils.ModelEmaV3(model, decay=0.5)
    schedule, epochs = scheduler.create_scheduler_v2(optimizer, num_epochs=EPOCHS, warmup_epochs=2)

    for epoch in range(epochs):
        losses = utils.AverageMeter()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update(model)
            losses.update(loss.detach(), len(x))
        schedule.step(epoch + 1)
        mean = strategy.reduce(ms.ReduceOp.MEAN, losses.avg, axis=None)
        strategy.print(f"epoch {epoch}: loss {mean:.8f}")
    total = sum(p.abs().sum().item() for p in averaged.module.parameters())
    strategy.print(f"parameters {total:.8f}")


if __name__ == "__main__":
    main()
