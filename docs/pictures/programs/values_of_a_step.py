"""Train one step. Each rank prints a line of JSON: shapes, gradients and weights."""

import json

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver


def rounded(tensor: torch.Tensor) -> list[float]:
    return [round(number, 4) for number in tensor.flatten().tolist()]


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    (batch,) = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=64))
    with strategy.scope():
        model = torch.nn.Linear(20, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: list[torch.Tensor]) -> dict[str, object]:
        x, y = batch
        losses = cross_entropy(model(x), y, reduction="none")
        loss = ms.compute_average_loss(losses, global_batch_size=64)
        (own,) = torch.autograd.grad(loss, model.bias, retain_graph=True)
        loss.backward()
        optimizer.step()
        return {
            "examples": list(x.shape),
            "gradient": rounded(own),
            "sum": rounded(model.bias.grad),
            "bias": rounded(model.bias),
        }

    found = strategy.run(step, args=(batch,))
    found["parameters"] = {name: list(value.shape) for name, value in model.named_parameters()}
    print(json.dumps({"rank": MPIClusterResolver().topology().rank, **found}), flush=True)


if __name__ == "__main__":
    main()
