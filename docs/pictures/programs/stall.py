"""Rank 1 does not come to the third sum: it sleeps. Each rank prints a line of JSON when it comes to a sum."""

import json
import time

import numpy as np

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver

RANK = MPIClusterResolver().topology().rank


def load(step: int) -> np.ndarray:
    time.sleep(600 if RANK == 1 and step == 2 else 0.25)
    return np.ones(4, np.float32)


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    for step in range(5):
        values = load(step)
        print(json.dumps({"rank": RANK, "sum": step + 1, "time": time.time()}), flush=True)
        strategy.reduce("sum", values, axis=None)


if __name__ == "__main__":
    main()
