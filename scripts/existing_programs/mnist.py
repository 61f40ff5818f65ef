"""A small convolutional network that reads handwritten digits: a program for one process."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, dropout, channels, image_size):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, 1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, 1)
        self.dropout1 = nn.Dropout(dropout / 2)
        self.dropout2 = nn.Dropout(dropout)
        self.fc1 = nn.Linear(2 * channels * ((image_size - 4) // 2) ** 2, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done, total = batch_idx * len(data), len(train_loader.dataset)
            percent = 100.0 * batch_idx / len(train_loader)
            print(f"Epoch {epoch} [{done}/{total} ({percent:.0f}%)]  loss {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()

    total = len(test_loader.dataset)
    print(f"Test set: average loss {test_loss / total:.4f}, accuracy {correct}/{total}")


def load_data(args):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).div(16).unsqueeze(1)
    images = F.interpolate(images, size=args.image_size)
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-360], labels[:-360])
    test = TensorDataset(images[-360:], labels[-360:])
    return (
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        DataLoader(test, batch_size=args.test_batch_size),
    )


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits")
    parser.add_argument("--batch-size", type=int, default=64, help="for training")
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate")
    parser.add_argument("--gamma", type=float, default=0.7, help="of the learning rate, by epoch")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--channels", type=int, default=8, help="of the first convolution")
    parser.add_argument("--image-size", type=int, default=8)
    parser.add_argument("--no-accel", action="store_true", help="use no accelerator")
    parser.add_argument("--dry-run", action="store_true", help="train for one step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10, help="in steps")
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    if not args.no_accel and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    else:
        device = torch.device("cpu")

    train_loader, test_loader = load_data(args)
    model = Net(args.dropout, args.channels, args.image_size).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
