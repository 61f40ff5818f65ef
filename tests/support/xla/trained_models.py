"""What the tests of TPUStrategy train, under any strategy, in this process or in a child."""

import torch

import mpistrat as ms

EXAMPLES = 16
STEPS = 4


def batches(
    number: int = STEPS, examples: int = EXAMPLES
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches; each call makes the same."""
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(examples, 4, generator=source), torch.randn(examples, 3, generator=source))
        for _ in range(number)
    ]


def normalized() -> torch.nn.Module:
    """No bias before the batch norm: its gradient is rounding alone, of which Adam makes steps."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )


def plain() -> torch.nn.Module:
    hidden = torch.nn.Linear(4, 8)
    output = torch.nn.Linear(8, 3)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), output)


class Training:
    """A model, an optimizer, and the step of both.

    Args:
        kind: "adam" (with a batch norm), "momentum", "sgd", or "synchronized" (a batch norm over all replicas).
    """

    def __init__(self, strategy: ms.Strategy, kind: str) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        with strategy.scope():
            self.model = normalized() if kind in ("adam", "synchronized") else plain()
            if kind == "synchronized":
                self.model = ms.convert_sync_batchnorm(self.model)
            parameters = self.model.parameters()
            if kind == "adam":
                self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=0.01)
            else:
                momentum = 0.9 if kind == "momentum" else 0.0
                self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=momentum)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        error = (self.model(inputs) - targets) ** 2
        loss = error.mean() / self.strategy.num_replicas_in_sync
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, number: int = STEPS) -> list[float]:
        """The losses of the global batches."""
        strategy = self.strategy
        return [
            float(strategy.reduce("sum", strategy.run(self.step, args=batch), axis=None))
            for batch in strategy.experimental_distribute_dataset(batches(number))
        ]

    def state(self) -> list[list[float]]:
        """All parameters and buffers but variances: XLA's batch norm has those of n, torch's on the CPU of n - 1.

        Called by: every rank.
        """
        return [
            tensor.detach().cpu().double().flatten().tolist()
            for name, tensor in self.model.state_dict().items()
            if not name.endswith("running_var")
        ]
