"""Saves and restores the random generators of replicas and ranks."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint.replica_states import StatesOfReplicas, local_replicas, schema_of_replicas
from mpistrat.checkpoint.schema import Schema, check
from mpistrat.input import generator_states
from mpistrat.liveness.call_site import outside
from mpistrat.strategy import Strategy


class RandomStates:
    """The states of torch's generators of each replica, and of Python's and NumPy's generators of each rank.

    After a restore, a replica continues the random numbers of the saved replica with the same id, on any rank. A rank
    continues Python's and NumPy's numbers if its first replica was the first replica of a rank. If several ranks saved
    equal states of a generator, other replicas and ranks take that state. Otherwise they get a seed from the replica's
    id and another saved state.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def rank_state_dict(self) -> dict[str, Any]:
        extended = self._strategy.extended
        torch_states: list[list[Any]] = []
        if "torch" in sys.modules:
            from mpistrat.pytorch.virtual_replicas import generators_of

            torch_states = generators_of(extended.replicas, extended.num_local_replicas)
        version, words, gauss = random.getstate()  # 625 words; an array is shorter than JSON
        return {
            **local_replicas(extended),
            "torch": torch_states,
            "device": extended.replicas.device_random_state,
            "python": (version, np.array(words, np.uint32), gauss),
            "numpy": np.random.get_state(),
        }

    def rank_state_schema(self, state: Mapping[str, Any]) -> Schema:
        """Return the schema of a rank's state."""
        schema = schema_of_replicas(state, "torch", _check_generators)
        if state.get("torch") == []:
            schema["torch"] = list
        schema["python"] = _check_python
        schema["numpy"] = generator_states.of_numpy
        if "device" in state:
            schema["device"] = (int, None)
        return schema

    def load_rank_state_dicts(self, states: Mapping[int, Any]) -> None:
        extended = self._strategy.extended
        replicas = StatesOfReplicas(states, extended.communicator.rank)
        some = replicas.some
        of = replicas.of
        first = extended.first_replica_id
        of_rank = of(first)
        if of_rank is None or of_rank["first_replica"] != first:
            of_rank = {}
            _seed_rank(some, first)
        for name, set_state in _SETTERS.items():
            if of_rank or _are_alike(states, name):
                set_state((of_rank or some)[name])
        is_new = first + extended.num_local_replicas > replicas.total
        missing = self._set_torch(some, first, of, is_new and _are_alike(states, "torch"))
        # Setting torch's generators also seeds the generators of devices, so the device's own state comes last.
        if of_rank.get("device") is not None:
            extended.replicas.set_device_random_state(of_rank["device"])
        # The replica before the first missing one is known on one rank only, so that one rank warns.
        if missing and of(missing[0] - 1) is not None:
            # Later ranks miss theirs, too.
            missing = [*range(missing[0], extended.num_replicas_in_sync)]
            frame = outside(sys._getframe())
            warnings.warn_explicit(
                f"the checkpoint has no random states of replicas {missing}; they draw numbers from new seeds",
                UserWarning,
                frame.f_code.co_filename,
                frame.f_lineno,
            )

    def draw_anew(self, saved: Mapping[str, Any], first: int) -> None:
        """Give this rank's generators new seeds, derived from the ids of its replicas and another rank's state.

        Called by: a worker that follows another worker's restore.
        Args:
            saved: the state of another rank, to derive the seeds from.
            first: id of this rank's first replica.
        """
        _seed_rank(saved, first)
        self._set_torch(saved, first, lambda replica: None)

    def _set_torch(
        self, some: Mapping[str, Any], first: int, of: Callable[[int], Any], alike: bool = False
    ) -> list[int]:
        """Set the torch generators of this rank's replicas; nothing if the program that saved did not use torch.

        Returns: the ids of the replicas that get new seeds.
        Args:
            some: the state of some rank.
            first: id of this rank's first replica.
            of: takes a replica's id, and returns the saved state of its rank, or None.
            alike: whether a replica without a saved state takes another one's. Else it gets a new seed.
        """
        if not some["torch"]:
            return []
        from mpistrat.pytorch.virtual_replicas import seeded_generators, set_generators_of

        extended = self._strategy.extended
        generators = []
        missing = []
        cpu = some["torch"][0][0].numpy().tobytes()
        for replica in range(first, first + extended.num_local_replicas):
            saved = of(replica)
            if saved is not None:
                generators.append(saved["torch"][replica - saved["first_replica"]])
            elif alike:
                generators.append(some["torch"][0])
            else:
                missing.append(replica)
                generators.append(seeded_generators(_seed(cpu, replica)))
        set_generators_of(extended.replicas, generators)
        for random_state in generator_states.loaded:
            random_state.remember()
        return missing


def _check_generators(states: Any) -> None:
    """Check the generator states of a replica: the first is the CPU's, the others are of devices."""
    cpu, *of_devices = states
    generator_states.of_torch(cpu)
    check(of_devices, [generator_states.of_torch_device], "torch")


def _check_python(state: Any) -> None:
    version, words, gauss = state
    generator_states.of_python((version, tuple(words.tolist()), gauss))


def _are_alike(states: Mapping[int, Any], name: str) -> bool:
    """Whether several ranks have saved equal states of the generators `name`. This may read the states of all ranks."""
    texts = (json.dumps(states[rank][name], default=_as_list) for rank in states)
    first = next(texts)
    return len(states) > 1 and all(text == first for text in texts)


def _as_list(array: Any) -> Any:
    return array.tolist()


def _set_python(state: Any) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words.tolist()), gauss))


_SETTERS = {"python": _set_python, "numpy": np.random.set_state}


def _seed_rank(saved: Mapping[str, Any], first: int) -> None:
    seed = _seed(saved["numpy"][1].tobytes(), first)
    random.seed(seed)
    np.random.seed(seed)


def _seed(state: bytes, replica: int) -> int:
    import hashlib  # imported here, so that `import mpistrat` stays fast

    digest = hashlib.sha256(state + replica.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:4], "little")
