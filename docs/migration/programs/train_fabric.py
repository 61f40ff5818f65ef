import torch
from lightning import Fabric
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(512, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(3):
        total = torch.zeros(())
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)
        total = fabric.all_reduce(total, reduce_op="sum")
        fabric.print(f"epoch {epoch}: loss {total / len(data):.4f}")
    fabric.save("model.pt", {"model": model})


if __name__ == "__main__":
    main()
