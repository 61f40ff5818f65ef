"""Training of which ranks are killed: `elastic.py SEED FOLDER [PLACE [WITH]]`, on every rank; with "-" for a seed, none
is. WITH is "shared parameters", "sentinel" or "replica", whose training function enters the replica for good.

Where, at which step and which rank the seed says; the place, too, unless it is given. Each rank tells FOLDER which
examples it read in which step, when it was killed or went on, and what it trained.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.fault_tolerance import committed_states
from mpistrat.fault_tolerance.survivors import Survivors

EXAMPLES, BATCH, EPOCHS, FEATURES = 96, 16, 4, 128
STEPS = EXAMPLES // BATCH * EPOCHS
PLACES = ("forward", "window", "MPI", "overlap", "commit", "anywhere", "recovery")

seed, folder = sys.argv[1], Path(sys.argv[2])
me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
plan = random.Random(f"elastic {seed}")
place = plan.choice(PLACES)
if len(sys.argv) > 3:
    place = sys.argv[3]
features = sys.argv[4:]
deterministic = place != "overlap" and plan.random() < 0.5
at = plan.randrange(1, STEPS)
victim, second = plan.sample(range(size), 2)
seconds = plan.random()  # of what lasts about one
if seed == "-":
    victim, deterministic = -1, place == "deterministic"

generator = torch.Generator().manual_seed(0)
X = torch.randn(EXAMPLES, FEATURES, generator=generator)
Y = X[:, :3].sum(1, keepdim=True)
trained = 0  # how often training began


def die() -> None:
    (folder / f"killed-{me}").write_text(str(time.time()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner: Any, name: str, number: int = 1) -> None:
    """At the `number`-th call of a function from now on."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def die_within(owner: Any, name: str, longest: float) -> None:
    """A moment after the next call of a function has begun."""
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(seconds * longest, die).start()
        return original(*args, **kwargs)

    setattr(owner, name, timed)


submit = CommunicationThread.submit
dies_in_work = False


def submit_and_die(self: CommunicationThread, work: Callable[[], None], frame: Any) -> Any:
    def dies() -> None:
        if dies_in_work:
            threading.Timer(seconds * 1e-3, die).start()
        work()

    return submit(self, dies, frame)


CommunicationThread.submit = submit_and_die  # type: ignore[method-assign]


def prepare_to_die() -> None:
    """The step that the seed chose begins."""
    global dies_in_work
    if place in ("forward", "recovery"):
        die()
    elif place == "window":
        die_at_call(Blocks, "tick", 2)
    elif place == "MPI":
        die_within(MpiTransport, "move", 1e-3)
    elif place == "overlap":
        dies_in_work = True
    elif place == "commit":
        die_at_call(committed_states, "copied", 5)
    else:
        threading.Timer(seconds * 0.1, die).start()


def train(elastic: ms.fault_tolerance.Elastic) -> None:
    global trained
    trained += 1
    implementation = {"MPI": ms.CommunicationImplementation.MPI}.get(place)
    options = ms.CommunicationOptions(
        implementation=implementation or ms.CommunicationImplementation.AUTO,
        overlap=place == "overlap",
    )
    torch.manual_seed(1 + me)
    strategy = elastic.strategy(
        deterministic=deterministic,
        communication_options=options,
        shared_parameters="shared parameters" in features,
    )
    with strategy.scope():
        dropout = torch.nn.Dropout(0.2 if deterministic else 0.0)
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, FEATURES),
            torch.nn.ReLU(),
            dropout,
            torch.nn.Linear(FEATURES, 1),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    examples = torch.utils.data.TensorDataset(X, Y, torch.arange(EXAMPLES))
    order = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(examples, BATCH, shuffle=True, generator=order)
    batches = strategy.experimental_distribute_dataset(loader)
    checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer, batches=batches)
    elastic.restore(checkpoint)
    if "sentinel" in features:
        ms.fault_tolerance.DivergenceSentinel(strategy, every=2)
    if "replica" in features:
        strategy.enter_replica()
    if trained > 1:
        (folder / f"went-on-{me}-{trained}").write_text(str(time.time()), encoding="utf-8")

    def step(batch: Any) -> torch.Tensor:
        x, y, ids = batch
        with open(folder / f"read-{me}", "a", encoding="utf-8") as read:
            read.write(json.dumps([elastic.step, trained, ids.tolist()]) + "\n")
        losses = (model(x) - y).square().squeeze(1)
        loss = ms.compute_average_loss(losses, global_batch_size=BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    while elastic.step < STEPS:
        for batch in batches:
            if me == victim and elastic.step == at:
                prepare_to_die()
            strategy.run(step, args=(batch,))
            elastic.commit()
    if me == victim and place == "anywhere":
        time.sleep(1)  # its time may come when the others wait at the end

    model.eval()
    with torch.no_grad():
        loss = float((model(X) - Y).square().mean())
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = {"digest": hashlib.sha256(parameters).hexdigest(), "loss": loss}
    (folder / f"result-{me}").write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    if me == second and place == "recovery" and victim >= 0:
        die_at_call(
            *plan.choice(
                [(Survivors, "go_on", 1), (Survivors, "meet", 2), (Survivors, "all_done", 1)]
            )
        )
    facts = {"place": place, "deterministic": deterministic, "at": at, "victim": victim}
    (folder / "plan").write_text(json.dumps(facts), encoding="utf-8")
    ms.fault_tolerance.run_elastic(train, min_replicas=2)


if __name__ == "__main__":
    main()
