"""Simulated clients: who they are, and in virtual time when each is present, how long its work takes, and whether it answers.

A client receives the model, takes its steps and sends its update, one after the other:

    seconds = download bytes / download rate + steps * seconds_per_step * factor + upload bytes / upload rate

Nothing waits; the numbers only decide who can be chosen, the order of answers, and what a deadline cuts off.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds.closing import Closing
from edge_client.train import seeding
from strategies.params import Params

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

DROPPED_OUT = "dropped out"
TOO_LATE = "not done by the deadline"
LEFT = "left before it was done"


@dataclass(frozen=True, eq=False)
class DeviceClass:
    """Clients that train the same width of the model, or the same model of their own.

    Attributes:
        width: 1 for a model that is not cut.
        share: of the clients.
        shapes: of all its params, leading parts of the whole model's.
        model_bytes: of its encoded params.
        options: of the model as the catalog has it.
        model: name of a model that is not the run's own.
        trained: names of the tensors that clients train, of such a model.
        initial: its params before round 1.
    """

    name: str
    width: float
    share: float
    shapes: Mapping[str, tuple[int, ...]]
    model_bytes: int
    options: Mapping[str, Any]
    model: str | None = None
    trained: tuple[str, ...] = ()
    initial: Params = field(default_factory=dict)

    @property
    def is_narrower(self) -> bool:
        """Whether its clients train a narrower model than the run's own."""
        return self.width < 1

    @property
    def has_other_model(self) -> bool:
        """Whether its clients do not train the run's own model."""
        return self.is_narrower or self.model is not None

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that clients train of a model that is not the run's own."""
        return {name: self.shapes[name] for name in self.trained}


@dataclass(frozen=True, slots=True)
class SimulatedClient:
    """One client. `index`: position of its examples in the partition. `device_class`: None: all clients train the same model."""

    name: str
    index: int
    num_examples: int
    runtime: str
    fault: str | None = None
    device_class: DeviceClass | None = None


Count = int | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """What a client, or each of several, does for one task. The bytes are those of tensors, without headers."""

    steps: Count
    download_bytes: Count = 0
    upload_bytes: Count = 0


@dataclass(frozen=True)
class Outlook:
    """What becomes of the tasks of several clients, by column.

    Attributes:
        seconds: from its start to the answer, or until nobody waits for one.
        silent: why there is no answer, by index.
        order: of answers of one moment; those with equal ones come in the order of the cohort.
    """

    seconds: Floats
    silent: dict[int, str]
    order: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Presence:
    """When clients are there: intervals of virtual time that repeat every `period_seconds`, in any number for each client.

    Attributes:
        owners: index of the client of each interval, ascending; the intervals of a client are in order and do not overlap.
        begins, ends: of each interval, within a period; it ends before the moment `ends`.
        offsets: int64 [clients + 1], the first interval of each client.
    """

    period_seconds: float
    owners: npt.NDArray[np.int64]
    begins: Floats
    ends: Floats
    offsets: npt.NDArray[np.int64]

    @staticmethod
    def of(period_seconds: float, intervals: Sequence[tuple[int, float, float]], clients: int) -> Presence:
        """`intervals`: client, begin and end, sorted."""
        owners = np.array([owner for owner, _, _ in intervals], np.int64)
        begins, ends = (np.array([each[at] for each in intervals], np.float64) for at in (1, 2))
        offsets = np.searchsorted(owners, np.arange(clients + 1))
        return Presence(period_seconds, owners, begins, ends, offsets.astype(np.int64))

    def at(self, now: float) -> Mask:
        """Who is there, bool [clients]."""
        moment = now % self.period_seconds
        present = np.zeros(len(self.offsets) - 1, np.bool_)
        present[self.owners[(self.begins <= moment) & (moment < self.ends)]] = True
        return present

    def remaining_seconds(self, index: int, now: float) -> float:
        """How long a client that is there stays; infinity if it never leaves, 0 if it is not there."""
        own = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        begins, ends = self.begins[own], self.ends[own]
        moment, remaining = now % self.period_seconds, 0.0
        while remaining < self.period_seconds:
            (inside,) = np.nonzero((begins <= moment) & (moment < ends))
            if not len(inside):
                return remaining
            end = float(ends[inside[0]])
            remaining += end - moment
            moment = end if end < self.period_seconds else 0.0
        return math.inf

    def next_arrival(self, now: float, among: Mask) -> float:
        """The next moment after `now` at which one of these clients arrives; infinity if none ever does."""
        ahead = self.begins - now % self.period_seconds
        waits = np.where(ahead > 0, ahead, ahead + self.period_seconds)[among[self.owners]]
        return max(now + float(waits.min()), math.nextafter(now, math.inf)) if len(waits) else math.inf


@dataclass(frozen=True)
class VirtualTime:
    """How all clients behave, by index.

    Attributes:
        seconds_per_step: of a client whose factor is 1.
        factors: how many times as long each client takes for a step.
        dropout: probability that a client does not answer in a round.
        download, upload: bytes a second; None: transfers take no time.
        presence: None: all clients are always there.
        stragglers: of synchronous rounds; None: there are none.
    """

    seconds_per_step: float
    factors: Floats
    dropout: Floats
    seed: int
    download: Floats | None = None
    upload: Floats | None = None
    presence: Presence | None = None
    stragglers: Stragglers | None = None

    def duration_seconds(self, index: Count, work: Work) -> Floats:
        """From the start of a task to its answer, if the client answers; of one client or of several."""
        seconds = work.steps * self.seconds_per_step * self.factors[index]
        if self.download is not None:
            seconds = seconds + work.download_bytes / self.download[index]
        if self.upload is not None:
            seconds = seconds + work.upload_bytes / self.upload[index]
        return np.asarray(seconds, np.float64)

    def find_dropouts(self, clients: Sequence[SimulatedClient], round_number: int) -> set[str]:
        """Which of these clients do not answer in a round; each is drawn by a generator of its own."""
        if not self.dropout.any():
            return set()
        words = [zlib.crc32(f"dropout {client.name}".encode()) for client in clients]
        draws = seeding.states_for([self.seed], words, [round_number]).first_randoms().tolist()
        return {
            client.name
            for client, drawn in zip(clients, draws, strict=True)
            if drawn < self.dropout[client.index]
        }

    def foresee(
        self, clients: Sequence[SimulatedClient], work: Work, round_number: int, now: float, closing: Closing
    ) -> Outlook:
        """What becomes of the tasks that these clients get at the moment `now`."""
        indices = np.array([client.index for client in clients])
        seconds = self.duration_seconds(indices, work)
        silent = dict.fromkeys(np.flatnonzero(seconds > closing.deadline_seconds).tolist(), TOO_LATE)
        if self.presence is not None:
            for at, each in enumerate(seconds.tolist()):
                if at not in silent and self.presence.remaining_seconds(clients[at].index, now) < each:
                    silent[at] = LEFT
        if dropouts := self.find_dropouts(clients, round_number):
            silent |= {at: DROPPED_OUT for at, client in enumerate(clients) if client.name in dropouts}
        seconds[list(silent)] = closing.deadline_seconds
        return Outlook(seconds, silent, np.zeros(len(clients), np.int64))

    def find_present(self, now: float) -> Mask | None:
        """Who is there, bool [clients]; None: everybody."""
        return None if self.presence is None else self.presence.at(now)

    def next_arrival(self, now: float, among: Mask) -> float:
        """The next moment after `now` at which one of these clients arrives; infinity if none ever does."""
        return math.inf if self.presence is None else self.presence.next_arrival(now, among)
