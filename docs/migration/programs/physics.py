"""A network learns u with u'' = -sin(x), and u = 0 at 0 and at pi."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)


def equation(u, x):
    """u'' + sin(x), which is 0 for a solution."""
    (du,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return ddu + torch.sin(x)


def main():
    torch.manual_seed(0)
    u = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(u.parameters(), lr=0.03)
    ends = torch.tensor([[0.0], [torch.pi]])
    for step in range(120):
        x = torch.pi * torch.rand(120, 1)
        x.requires_grad_()
        loss = (equation(u, x) ** 2).mean() + (u(ends) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            loss = loss.item()
            print(f"step {step}: loss {loss:.4f}")
    middle = u(torch.tensor([[torch.pi / 2]])).item()
    print(f"u(pi / 2) = {middle:.2f}, sin(pi / 2) = 1")


if __name__ == "__main__":
    main()
