"""Checkpoints of a simulation: after each round everything that a resumed run needs is durable.

Params, strategy state and client states are blobs; `checkpoint.json` names them together with the round. Replacing that
small file atomically is the commit: a crash leaves either the previous round or the new one. Randomness is derived from
the seed and the round and needs no saving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.rounds.records import RunState
from coordinator.storage.blobs import BlobDamaged, Blobs
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Params, Tensors
from strategies.state import State, flatten, unflatten

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round.

    Attributes:
        round: last finished round, 0 before the first.
        record: that round's line of the report.
        offsets: sizes in bytes of the line files at the commit, by file name.
        identity: values that must be the same on resume, such as the data's fingerprint.
    """

    round: int
    params: Tensors
    state: State
    record: Mapping[str, Any]
    offsets: Mapping[str, int]
    identity: Mapping[str, str]
    client_states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)


def materialize_in(blobs: Blobs, state: RunState) -> RunState:
    """The same state, computed while it is written to `blobs`; its arrays are then read from there.

    The commit stores the same arrays again, which costs nothing (`Blobs.put_arrays`). Either both params and state are
    stored or neither.
    """
    values = state.strategy.values
    strategy, params = blobs.store_all([(state.strategy.arrays, values), (state.params, None)])
    return RunState(state.round, params, State(strategy, values))


class CheckpointStore:
    """The checkpoint of one run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._pointer = folder / "checkpoint.json"
        self._blobs = Blobs(folder / "blobs")
        self._clients: dict[str, str] = {}

    def commit(self, checkpoint: Checkpoint) -> None:
        """Replaces the stored checkpoint. `client_states` holds only the changed ones.

        Raises:
            OSError: the disk is full or not writable; the previous round stays committed.
        """
        params = self._blobs.put_arrays(checkpoint.params).sha256
        state = self._blobs.put_arrays(checkpoint.state.arrays, checkpoint.state.values).sha256
        clients = self._clients | {
            client: self._blobs.put_arrays(flatten(streams)).sha256
            for client, streams in checkpoint.client_states.items()
        }
        document = {
            "format": FORMAT,
            "round": checkpoint.round,
            "params": params,
            "state": state,
            "clients": clients,
            "record": dict(checkpoint.record),
            "offsets": dict(checkpoint.offsets),
            "identity": dict(checkpoint.identity),
        }
        write_durably(self._pointer, json.dumps(document).encode())
        self._clients = clients
        self._blobs.keep_only({params, state, *clients.values()})

    def load(self) -> Checkpoint | None:
        """The stored checkpoint with all client states, or None if there is none.

        Raises:
            UserError: the checkpoint is damaged or of another version; names the file.
        """
        try:
            document = json.loads(self._pointer.read_bytes())
            if document["format"] != FORMAT:
                raise UserError(f"{self._pointer}: format {document['format']}, this version reads {FORMAT}")
            self._clients = dict(document["clients"])
            state = self._blobs.get(document["state"])
            return Checkpoint(
                round=document["round"],
                params=arrays.decode(self._blobs.get(document["params"])),
                state=State(arrays.decode(state), arrays.read_header(state).values),
                record=document["record"],
                offsets=document["offsets"],
                identity=document["identity"],
                client_states={
                    client: unflatten(arrays.decode(self._blobs.get(digest)))
                    for client, digest in self._clients.items()
                },
            )
        except FileNotFoundError:
            return None
        except (BlobDamaged, arrays.Malformed, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self._pointer}: the checkpoint is damaged: {error}; start the run anew"
            ) from None
