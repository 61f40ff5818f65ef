import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main():
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(512, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    order = torch.Generator()
    sampler = RandomSampler(data, generator=order)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        order.manual_seed(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)
        total = accelerator.reduce(total, "sum")
        accelerator.print(f"epoch {epoch}: loss {total / len(data):.4f}")
    state = accelerator.unwrap_model(model).state_dict()
    accelerator.save(state, "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
