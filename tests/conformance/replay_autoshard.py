"""Area autoshard: what each worker reads, without ranks: the two split rules, and readers of made-up workers."""

from __future__ import annotations

from typing import Any

from conformance import sources
from conformance.outcomes import CannotInterpret, probe
from conformance.stage import Handler, Stage
from mpistrat import nest
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.input import BatchedDataset, FileDataset
from mpistrat.input.batches import Batches, without_examples
from mpistrat.input.file_reader import FileReader
from mpistrat.input.readers import BatchReader, IndexReader, Reader
from mpistrat.input.splitting import EMPTY, MISSING, pieces_of_each, pieces_of_stream
from mpistrat.input.torch_loader import LoaderReader, is_map_style
from mpistrat.options import AutoShardPolicy, InputOptions
from mpistrat.replicas.input_plan import Share


def _share(workers: int, worker: int, replicas_per_worker: int) -> Share:
    """That of a worker all of whose replicas are one rank's."""
    return Share(workers, worker, workers * replicas_per_worker, range(replicas_per_worker))


def _policy(stage: Stage) -> AutoShardPolicy:
    name = stage.inputs["source"].get("policy", "AUTO")
    policy = InputOptions(experimental_auto_shard_policy=name).experimental_auto_shard_policy
    assert isinstance(policy, AutoShardPolicy)
    return policy


def _reader(dataset: Any, share: Share, policy: AutoShardPolicy) -> Reader:
    if isinstance(dataset, BatchedDataset):
        return IndexReader(dataset, share, policy)
    if isinstance(dataset, FileDataset):
        return FileReader(dataset, share, policy)
    if is_map_style(dataset):
        return LoaderReader(dataset, share, policy, LocalCommunicator())
    return BatchReader(dataset, share, policy)


def _pieces(reader: Reader) -> list[Any]:
    """What the reader gives, replica after replica, without what no replica gets."""
    entries = [entry for step in reader.steps(0, 0) for entry in step if entry is not MISSING]
    return [without_examples(reader.template()) if entry is EMPTY else entry for entry in entries]


def _probes_of_workers(stage: Stage, program: Any) -> list[Any]:
    return [probe(lambda worker=worker: program(worker)) for worker in range(_workers(stage))]


def _workers(stage: Stage) -> int:
    return stage.program["workers"]


def batch_sizes_for_worker(stage: Stage) -> Any:
    replicas, size = stage.program["replicas_per_worker"], stage.inputs["global_batch_size"]
    shares = [_share(_workers(stage), worker, replicas) for worker in range(_workers(stage))]
    return {"per_worker": [share.sizes(size) for share in shares]}


def compute_batch_size(stage: Stage) -> Any:
    """What a reader for two replicas takes for the batch size of a dataset that it can read."""
    dataset = sources.dataset(stage.inputs["source"], stage.library, stage.form)
    reader = _reader(dataset, _share(1, 0, 2), _policy(stage))
    next(reader.steps(0, 0))
    return {"value": -1 if reader.batch_size is None else reader.batch_size}


def distribute_dataset_worker_stream(stage: Stage) -> Any:
    policy = _policy(stage)

    def stream(worker: int) -> list[Any]:
        dataset = sources.dataset(stage.inputs["source"], stage.library, stage.form)
        share = _share(_workers(stage), worker, stage.program["replicas_per_worker"])
        return _pieces(_reader(dataset, share, policy))

    return {"per_worker_stream": _probes_of_workers(stage, stream)}


def auto_shard_dataset(stage: Stage) -> Any:
    """Elements are shared out one by one: batches of one element for each worker, each of which has one replica."""
    policy, workers = _policy(stage), _workers(stage)

    def shard(worker: int) -> list[Any]:
        pieces = _pieces(_reader(_in_batches(stage, workers), _share(workers, worker, 1), policy))
        return [
            nest.map_structure(lambda leaf: leaf[i], piece)  # noqa: B023 (called at once)
            for piece in pieces
            for i in range(Batches().size(piece))
        ]

    return {"per_worker": _probes_of_workers(stage, shard)}


def _in_batches(stage: Stage, size: int) -> Any:
    source = stage.inputs["source"]
    if source.get("ops") and source["kind"] == "text_files":
        raise CannotInterpret(f"ops {source['ops']!r} of files")
    batched = {**source, "ops": [*source.get("ops", []), ["batch", size, False]]}
    library, form = sources.forms(batched)[0]
    return sources.dataset(batched, library, form)


def legacy_rebatch(stage: Stage) -> Any:
    n = stage.program["num_replicas"]
    batches = sources.dataset(stage.inputs["source"], stage.library, stage.form)
    pieces = pieces_of_each(batches, Batches(), range(n), n)
    return {"batches": [piece for step in pieces for piece in step]}


def rebatch(stage: Stage) -> Any:
    batches = sources.dataset(stage.inputs["source"], stage.library, stage.form)
    sizes, drop = stage.program["batch_sizes"], stage.program["drop_remainder"]
    return {"batches": list(pieces_of_stream(batches, Batches(), sizes, drop_last=drop))}


HANDLERS: dict[str, Handler] = {
    "batch_sizes_for_worker": batch_sizes_for_worker,
    "compute_batch_size": compute_batch_size,
    "distribute_dataset_worker_stream": distribute_dataset_worker_stream,
    "auto_shard_dataset": auto_shard_dataset,
    "legacy_rebatch": legacy_rebatch,
    "rebatch": rebatch,
}
