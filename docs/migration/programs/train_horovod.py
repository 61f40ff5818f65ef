import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)
        total = hvd.allreduce(total, op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {total / len(data):.4f}")
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
