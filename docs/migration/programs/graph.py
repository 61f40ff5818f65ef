"""A graph network of two layers. Each step reads all nodes of one graph."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

NODES = 300


def random_graph():
    """Nodes of three classes: neighbours, features and labels."""
    labels = torch.arange(NODES) % 3
    same = labels[:, None] == labels
    edges = torch.rand(NODES, NODES) < torch.where(same, 0.05, 0.02)
    edges = (edges | edges.T | torch.eye(NODES, dtype=torch.bool)).float()
    features = torch.randn(NODES, 16) + 0.5 * nn.functional.one_hot(labels, 16)
    return edges / edges.sum(1, keepdim=True), features, labels


def main():
    torch.manual_seed(0)
    neighbours, features, labels = random_graph()
    first, second = nn.Linear(16, 32), nn.Linear(32, 3)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for step in range(30):
        hidden = torch.relu(first(neighbours @ features))
        output = second(neighbours @ hidden)
        loss = cross_entropy(output, labels, reduction="sum") / NODES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
