"""An asynchronous run over devices that a test moves one by one, in an order that it chooses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import update as update_rows

from coordinator.db import buffers, rounds
from coordinator.db import runs as rows
from coordinator.db.tables import runs
from coordinator.fleets.device_asynchronous import AsynchronousDeviceFleet
from coordinator.rounds import asynchronous
from coordinator.rounds.fleet import Stopped
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.records import RoundRecord, RunState
from coordinator.runs.live_store import LiveStore
from coordinator.scheduling.deployments import Deployment
from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage, TaskOffer
from strategies.params import Params
from tests.support.device_world import TestDevice, World
from tests.support.memory_fleet import MemoryClient
from tests.support.quadratic import QuadraticRuntime
from tests.support.runs import Seen, distance, first_state
from tests.support.waiting import wait_until

RUN = "r"


class BufferedRun:
    """A run whose rounds a thread runs; `devices` are enrolled and known before it begins."""

    def __init__(
        self, world: World, plan: RunPlan, clients: Mapping[str, MemoryClient], start: Params, **settings: Any
    ) -> None:
        self.world = world
        self._plan = plan
        self._clients = clients
        self._patience_seconds: float = settings.pop("patience_seconds", 60.0)
        self.devices: dict[str, TestDevice] = {}
        self.deployment: Deployment = replace(world.start_run(RUN), **settings)
        self._begin(start)
        for name, client in clients.items():
            self.devices[name] = world.enrol(name)
            self.check_in(name, client)
        self.continue_()

    def continue_(self) -> None:
        """Runs the missing rounds, as a process does that finds the run."""
        self.seen = Seen()
        self.fleet = AsynchronousDeviceFleet(
            self.world.services, self.deployment, patience_seconds=self._patience_seconds
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the rounds at once, wherever they are."""
        self.fleet.stop()
        self._thread.join()

    def finish(self) -> RunState:
        """Waits for the last round and returns the state after it."""
        self._thread.join()
        return self.state()

    def state(self) -> RunState:
        """The state after the last committed round."""
        return LiveStore(self.world.services, RUN).load(self._row())

    def _row(self) -> Any:
        return self.world.services.database.read(partial(rows.find, run=RUN))

    def records(self) -> list[dict[str, Any]]:
        return self.world.services.database.read(lambda at: rows.records(at, RUN))

    def check_in(self, name: str, client: MemoryClient | None = None) -> None:
        datasets = {"digits": (client or self._clients[name]).num_examples}
        self.devices[name].check_in(datasets=datasets)

    def offer(self, name: str) -> TaskOffer:
        """The task of a device, once it has one."""
        datasets = {"digits": self._clients[name].num_examples}
        return self.devices[name].lease(wait_seconds=50, datasets=datasets)

    def trained(self, offer: TaskOffer) -> bytes:
        """What an honest device uploads for a task."""
        work = TaskMessage.from_json(offer.message)
        client, device = self._clients[work.client], self.devices[work.client]
        params = arrays.decode(device.fetch(offer.params.sha256).content)
        assert arrays.sha256(arrays.encode(params)) == work.base
        examples = Examples(
            np.zeros((client.num_examples, 1), np.float32), np.zeros(client.num_examples, np.int32)
        )
        trainer = Trainer(QuadraticRuntime(client.a, client.c))
        return encode_result(work, trainer.train(params, TrainTask.of(work, {}), examples).update)

    def deliver(self, name: str) -> TaskOffer:
        """A device trains its task and uploads the result."""
        offer = self.offer(name)
        assert self.devices[name].upload(offer.task, self.trained(offer)).accepted
        return offer

    def settle(self) -> None:
        """Waits until every device that may be at work is."""
        wait_until(lambda: not self._thread.is_alive() or self._is_settled())

    def play(self, order: Sequence[str]) -> None:
        """Devices deliver in this order; each sees all that the one before it has set off."""
        for name in order:
            self.settle()
            self.deliver(name)

    def _is_settled(self) -> bool:
        assert self._plan.asynchrony is not None
        concurrency = self._plan.asynchrony.concurrency

        def work(connection: Any) -> bool:
            number = rows.require(connection, RUN).round + 1
            opened = rounds.find_round(connection, RUN, number)
            waiting = [each for each in buffers.waiting(connection, RUN) if each.blob is not None]
            if opened is None or opened.state != "open" or len(waiting) >= opened.wanted:
                return False
            at_work = {task.device for task in buffers.live(connection, RUN)}
            busy = at_work | set(buffers.started_in(connection, RUN, number))
            return len(at_work) == concurrency or busy >= self.devices.keys()

        return self.world.services.database.read(work)

    def _begin(self, start: Params) -> None:
        """Stores the first model, as the preparation of a run does."""
        services = self.world.services
        params, strategy = LiveStore(services, RUN).put(first_state(self._plan, start))
        values = {"params": params, "strategy_state": strategy}
        services.database.write(
            lambda at: at.execute(update_rows(runs).where(runs.c.id == RUN).values(**values))
        ).result()

    def _work(self) -> None:
        store = LiveStore(self.world.services, RUN)
        try:
            asynchronous.run(
                self._plan,
                self.fleet,
                store.load(self._row()),
                _Recording(store, self.seen),
                evaluate=distance,
                emit=self.seen.emit,
                monotonic=lambda: 0.0,
            )
        except Stopped:
            pass
        finally:
            store.release()


class _Recording:
    """A store that also tells the test."""

    def __init__(self, store: LiveStore, seen: Seen) -> None:
        self._store = store
        self._seen = seen
        self.materialize = store.materialize
        self.commit = store.commit

    def on_committed(self, record: RoundRecord) -> None:
        self._seen.records.append(record)
