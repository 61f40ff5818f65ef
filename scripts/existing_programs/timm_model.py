"""A model of timm's, with timm's optimizer, scheduler and loss, in a loop of PyTorch's: a program for one process."""

import argparse

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Classifies made-up pictures")
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--img-size", type=int, default=224)
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--examples", type=int, default=512)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--opt", default="adamw")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(args.seed)


def pictures(examples):
    """Their brightness goes with the class."""
    labels = torch.randint(args.num_classes, (examples,))
    brightness = labels.view(-1, 1, 1, 1) / args.num_classes
    return TensorDataset(
        torch.randn(examples, 3, args.img_size, args.img_size) + brightness, labels
    )


loader_train = DataLoader(pictures(args.examples), batch_size=args.batch_size, shuffle=True)
loader_eval = DataLoader(pictures(args.examples // 8), batch_size=args.batch_size)
model = timm.create_model(args.model, num_classes=args.num_classes, img_size=args.img_size)
optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=0.05)
lr_scheduler, num_epochs = create_scheduler_v2(optimizer, num_epochs=args.epochs, warmup_epochs=1)
train_loss_fn = LabelSmoothingCrossEntropy(smoothing=0.1)
num_updates = 0

for epoch in range(args.epochs):
    model.train()
    for input, target in loader_train:
        optimizer.zero_grad()
        loss = train_loss_fn(model(input), target)
        loss.backward()
        optimizer.step()
        num_updates += 1
        lr_scheduler.step_update(num_updates)
    lr_scheduler.step(epoch + 1)

    model.eval()
    correct, total = 0, 0.0
    with torch.no_grad():
        for input, target in loader_eval:
            output = model(input)
            correct += (output.argmax(1) == target).sum().item()
            total += cross_entropy(output, target, reduction="sum").item()
    examples = len(loader_eval.dataset)
    print(f"epoch {epoch}: loss {total / examples:.6f}, top 1 {correct / examples:.4f}")

torch.save(model.state_dict(), "timm_model.pt")
