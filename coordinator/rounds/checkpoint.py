"""A committed round: everything needed to go on from it, durable before the next round starts.

Params, strategy state and client states are blobs; `checkpoint.json` names them together with the round.
Replacing that one small file is the commit. A crash before it leaves the previous round, after it the new
one; there is nothing in between. Randomness is derived from the seed and the round, so it needs no saving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.blobs import BlobDamaged, Blobs
from coordinator.errors import UserError
from coordinator.rounds.engine import Keep, RunState
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Params, Tensors
from strategies.state import State, joined, parted

FORMAT = 1


@dataclass(frozen=True)
class Committed:
    """A run as of a round.

    Attributes:
        round: last finished round, 0 before the first.
        record: that round's line of the report.
        offsets: sizes in bytes of the line files as they were at the commit, by file name.
        identity: what must be equal on resume, such as the data's fingerprint.
    """

    round: int
    params: Tensors
    state: State
    record: Mapping[str, Any]
    offsets: Mapping[str, int]
    identity: Mapping[str, str]
    client_states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)


def keep_in(blobs: Blobs) -> Keep:
    """For `engine.run`: what a round came to is computed as it is written to `blobs`, and read from there after.

    To commit it is then to store it once more, which costs nothing (`Blobs.put_arrays`). Where the params or the state
    cannot be kept, neither is.
    """

    def keep(state: RunState) -> RunState:
        values = state.strategy.values
        strategy, params = blobs.keep_all([(state.strategy.arrays, values), (state.params, None)])
        return RunState(state.round, params, State(strategy, values))

    return keep


class Checkpoints:
    """The checkpoint of one run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._pointer = folder / "checkpoint.json"
        self._blobs = Blobs(folder / "blobs")
        self._clients: dict[str, str] = {}

    def commit(self, now: Committed) -> None:
        """Makes `now` the committed round. `client_states` holds the changed ones only.

        Raises:
            OSError: the disk is full or not writable; the previous round stays committed.
        """
        params = self._blobs.put_arrays(now.params).sha256
        state = self._blobs.put_arrays(now.state.arrays, now.state.values).sha256
        clients = self._clients | {
            client: self._blobs.put_arrays(joined(streams)).sha256
            for client, streams in now.client_states.items()
        }
        document = {
            "format": FORMAT,
            "round": now.round,
            "params": params,
            "state": state,
            "clients": clients,
            "record": dict(now.record),
            "offsets": dict(now.offsets),
            "identity": dict(now.identity),
        }
        write_durably(self._pointer, json.dumps(document).encode())
        self._clients = clients
        self._blobs.keep_only({params, state, *clients.values()})

    def load(self) -> Committed | None:
        """The committed round with all client states, or None where none was committed yet.

        Raises:
            UserError: the checkpoint is damaged or of another version; names the file.
        """
        try:
            document = json.loads(self._pointer.read_bytes())
            if document["format"] != FORMAT:
                raise UserError(f"{self._pointer}: format {document['format']}, this version reads {FORMAT}")
            self._clients = dict(document["clients"])
            state = self._blobs.get(document["state"])
            return Committed(
                round=document["round"],
                params=arrays.decode(self._blobs.get(document["params"])),
                state=State(arrays.decode(state), arrays.read_header(state).values),
                record=document["record"],
                offsets=document["offsets"],
                identity=document["identity"],
                client_states={
                    client: parted(arrays.decode(self._blobs.get(digest)))
                    for client, digest in self._clients.items()
                },
            )
        except FileNotFoundError:
            return None
        except (BlobDamaged, arrays.Malformed, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self._pointer}: the checkpoint is damaged: {error}; start the run anew"
            ) from None
