"""What timm's train.py does: `mpirun -n 2 mpistrat run scripts/torch_distributed/timm_train.py`."""

from argparse import Namespace

import timm
import torch
from timm import data, optim, scheduler, utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, EPOCHS, CLASSES, SIZE = 48, 8, 4, 32


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """As many as a global batch: in whichever order a sampler takes them, a step has the same."""

    transform = None  # create_loader puts one here, for images of PIL

    def __len__(self) -> int:
        return GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        return noise + index % CLASSES, index % CLASSES


def main() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    args = Namespace(device=found.type if found else "cpu")
    device = utils.init_distributed_device(args)
    utils.random_seed(0, rank=0)
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes).to(device)
    optimizer = optim.create_optimizer_v2(model, opt="adamw", lr=1e-2)
    averaged = utils.ModelEmaV3(model, decay=0.5)
    if args.distributed:
        model = DistributedDataParallel(model, None if device.type == "cpu" else [device])
    options = {"use_prefetcher": False, "num_workers": 0, "distributed": args.distributed}
    loader = data.create_loader(
        Images(), (3, SIZE, SIZE), GLOBAL_BATCH // args.world_size, is_training=True, **options
    )
    schedule, epochs = scheduler.create_scheduler_v2(optimizer, num_epochs=EPOCHS, warmup_epochs=2)

    for epoch in range(epochs):
        if args.distributed:
            loader.sampler.set_epoch(epoch)
        losses = utils.AverageMeter()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update(model)
            losses.update(loss.detach())
        schedule.step(epoch + 1)
        mean = utils.reduce_tensor(losses.avg, args.world_size) if args.distributed else losses.avg
        if utils.is_primary(args):
            print(f"epoch {epoch}: loss {mean:.8f}")
    if utils.is_primary(args):
        print(f"parameters {sum(p.abs().sum().item() for p in averaged.module.parameters()):.8f}")


if __name__ == "__main__":
    main()
