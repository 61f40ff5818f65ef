"""Ask for everything that does nothing, twice, on both ranks; print what each rank hears."""

import types
import warnings

import numpy as np
from mpi4py import MPI

import mpistrat as ms

RANK = MPI.COMM_WORLD.rank
OPTIONS = ms.CommunicationOptions


def server(**arguments):
    ms.Server({"ps": ["a", "b"]}, "ps", RANK, start=False, **arguments)


def all_reduce(**options):
    def replica():
        ms.get_replica_context().all_reduce("sum", np.ones(1), OPTIONS(**options))

    strategy.run(replica)


def all_gather(**options):
    def replica():
        ms.get_replica_context().all_gather(np.ones(1), 0, OPTIONS(**options))

    strategy.run(replica)


def dataset(**options):
    made = ms.MirroredStrategy().distribute_datasets_from_function(
        lambda context: [np.ones(1)], ms.InputOptions(**options)
    )
    assert len([*made]) == 1


strategy = ms.compat.v1.experimental.MultiWorkerMirroredStrategy()
PER_REPLICA = ms.InputReplicationMode.PER_REPLICA
CALLS = {
    "timeout_seconds of CommunicationOptions": (
        lambda: ms.MultiWorkerMirroredStrategy(None, OPTIONS(timeout_seconds=60)),
        lambda: ms.MultiWorkerMirroredStrategy(
            None, OPTIONS(timeout_seconds=0), deterministic=True
        ),
        lambda: ms.MirroredStrategy(
            communication_options=ms.experimental.CollectiveHints(timeout_seconds=60)
        ),
        lambda: all_reduce(timeout_seconds=60),
        lambda: all_gather(timeout_seconds=60),
    ),
    "overlap in the options of one call": (lambda: all_reduce(overlap=True),),
    "wire_dtype in the options of one call": (lambda: all_gather(wire_dtype="bfloat16"),),
    "wire_format in the options of one call": (
        lambda: all_reduce(wire_format=ms.wire_formats.ShortFloats("bfloat16")),
    ),
    "RunOptions": (
        lambda: strategy.run(int, options=ms.RunOptions()),
        lambda: strategy.experimental_run_v2(
            int, options=ms.RunOptions(experimental_enable_dynamic_batch_size=False)
        ),
    ),
    "protocol of a Server": (lambda: server(protocol="grpc"),),
    "config of a Server": (lambda: server(config=object()),),
    "configure": (lambda: strategy.configure(cluster_spec={"worker": ["a", "b", "c"]}),),
    "the copy that update_config_proto returns": (
        lambda: strategy.update_config_proto(types.SimpleNamespace()),
    ),
    "session of experimental_make_numpy_dataset": (
        lambda: strategy.experimental_make_numpy_dataset(np.ones(2), session=object()),
    ),
    "name of group": (lambda: strategy.group(1, name="train"),),
    "experimental_place_dataset_on_device": (
        lambda: dataset(
            experimental_replication_mode=PER_REPLICA,
            experimental_place_dataset_on_device=True,
            experimental_fetch_to_device=False,
        ),
    ),
    "experimental_auto_shard_policy with distribute_datasets_from_function": (
        lambda: dataset(experimental_auto_shard_policy="OFF"),
    ),
}
ASKS_NOTHING = (
    lambda: ms.MultiWorkerMirroredStrategy(None, OPTIONS(bytes_per_pack=1, overlap=True)),
    lambda: all_reduce(bytes_per_pack=1),
    lambda: strategy.run(int),
    lambda: server(),
    lambda: strategy.configure(),
    lambda: strategy.experimental_make_numpy_dataset(np.ones(2)),
    lambda: strategy.group(1),
    lambda: dataset(),
)


def heard(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [text for text in map(str, (w.message for w in caught)) if "does nothing here" in text]


for call in ASKS_NOTHING:
    assert heard(call) == []
for what, calls in CALLS.items():
    texts = [text for call in calls + calls for text in heard(call)]
    expected = [f"{what} does nothing here: "] if RANK == 0 else []
    assert [text[: len(what) + 20] for text in texts] == expected, (what, texts)
    assert all(len(text) > len(what) + 40 for text in texts)  # which says why
print(f"rank {RANK} has heard what it should\n", end="", flush=True)
