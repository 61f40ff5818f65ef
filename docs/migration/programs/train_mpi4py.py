import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import mse_loss


def main():
    comm = MPI.COMM_WORLD
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = x.sum(1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    for p in model.parameters():
        comm.Bcast(p.detach().numpy(), root=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(3):
        total = 0.0
        for batch in torch.randperm(len(x)).split(64):
            mine = batch[comm.rank :: comm.size]
            loss = mse_loss(model(x[mine]), y[mine], reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                comm.Allreduce(MPI.IN_PLACE, p.grad.numpy())
                p.grad /= len(batch)
            optimizer.step()
            total += loss.item()
        total = comm.allreduce(total)
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {total / len(x):.4f}")
    if comm.rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
