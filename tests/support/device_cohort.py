"""Devices by script: each trains for real on a parabola and delivers after so many seconds of the fleet's clock.

Every device is a thread that holds a long poll, as a daemon does. One more thread has them deliver in the order of
their seconds, once all tasks of a round were fetched, and moves the clock to that moment first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

import httpx
import numpy as np
from sqlalchemy import func, select

from coordinator.db.tables import rounds, tasks
from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage, TaskOffer
from strategies.params import Params, unflatten
from strategies.update import Update
from tests.support.device_world import REPORT, Refused, TestDevice, World
from tests.support.quadratic import QuadraticRuntime


@dataclass(frozen=True)
class _Result:
    seconds: float
    offer: TaskOffer
    payload: bytes
    state: Mapping[str, Params]


Changed = Callable[[TaskMessage, Update], Update]


def _unchanged(task: TaskMessage, update: Update) -> Update:
    return update


class ScriptedDevice:
    """A device whose loss is a/2 · (w − c)²; it keeps the state of the client rule itself.

    `changed`: what it sends in place of its update.
    """

    def __init__(
        self, client: TestDevice, a: float, c: float, seconds: float, changed: Changed = _unchanged
    ) -> None:
        self._changed = changed
        self.client = client
        self._trainer = Trainer(QuadraticRuntime(a, c))
        self._seconds = seconds
        self._state: Mapping[str, Params] | None = None
        self.delivered = threading.Event()

    def train(self, offer: TaskOffer) -> _Result:
        work = TaskMessage.from_json(offer.message)
        params = arrays.decode(self.client.fetch(offer.params.sha256).content)
        extra = arrays.decode(self.client.fetch(offer.streams.sha256).content) if offer.streams else {}
        count = REPORT.datasets["digits"]  # as it declares
        rows = Examples(np.zeros((count, 1), np.float32), np.zeros(count, np.int32))
        result = self._trainer.train(params, TrainTask.of(work, unflatten(extra)), rows, self._state)
        sent = encode_result(work, self._changed(work, result.update))
        return _Result(self._seconds, offer, sent, result.client_state)

    def deliver(self, result: _Result) -> None:
        """New state is kept once the update was accepted; a refusal is for the coordinator to tell."""
        try:
            if self.client.upload(result.offer.task, result.payload).accepted:
                self._state = result.state
        except Refused:
            pass
        self.delivered.set()


class Cohort:
    """Devices at work until the world ends."""

    def __init__(self, world: World, devices: Mapping[str, ScriptedDevice]) -> None:
        self._world = world
        self._devices = devices
        self._done: queue.Queue[_Result] = queue.Queue()
        for name, device in devices.items():
            device.client.check_in()  # so that it is known before anyone asks for clients
            threading.Thread(target=self._work, args=(device,), name=f"device-{name}", daemon=True).start()
        threading.Thread(target=self._deliver, name="deliveries", daemon=True).start()

    def _work(self, device: ScriptedDevice) -> None:
        with self._failing_loudly():
            self._serve(device)

    def _serve(self, device: ScriptedDevice) -> None:
        while not self._world.services.signals.closed:
            offer = device.client.check_in(wait_seconds=50).task
            if offer is not None:
                device.delivered.clear()
                try:
                    self._done.put(device.train(offer))
                except Refused:  # cancelled meanwhile
                    continue
                device.delivered.wait()

    @contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """A thread that fails ends the world, so that no test waits for what will not come."""
        try:
            yield
        except httpx.TransportError:
            if not self._world.services.signals.closed:
                raise
        finally:
            self._world.services.signals.close()

    def _deliver(self) -> None:
        with self._failing_loudly():
            self._deliver_rounds()

    def _deliver_rounds(self) -> None:
        while True:
            results = [self._done.get()]
            first = results[0].offer
            while len(results) < self._requested(first):
                results.append(self._done.get())
            for result in sorted(results, key=lambda each: (each.seconds, self._position(each.offer))):
                if self._world.services.signals.closed:
                    return
                self._world.clock.now = self._began(first) + timedelta(seconds=result.seconds)
                self._devices[result.offer.message["client"]].deliver(result)

    def _requested(self, offer: TaskOffer) -> int:
        query = select(func.count()).where(tasks.c.run == offer.run, tasks.c.round == offer.round)
        return int(self._world.services.database.read(lambda at: at.execute(query).scalar_one()))

    def _position(self, offer: TaskOffer) -> int:
        query = select(tasks.c.position).where(tasks.c.id == offer.task)
        return int(self._world.services.database.read(lambda at: at.execute(query).scalar_one()))

    def _began(self, offer: TaskOffer) -> datetime:
        query = select(rounds.c.started_at).where(rounds.c.run == offer.run, rounds.c.number == offer.round)
        began: datetime = self._world.services.database.read(lambda at: at.execute(query).scalar_one())
        return began
