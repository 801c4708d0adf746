"""The simulated fleets of a run that replays a trace: clients train as ever; who answers, when, and with what outcome is recorded.

A recorded rejection stays one, and a client that was silent stays silent, whatever would become of it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.errors import UserError
from coordinator.fleets.simulated import SimulatedFleet, accept
from coordinator.fleets.simulated_asynchronous import Trainer, Workers, Working
from coordinator.fleets.simulated_clients import Outlook, SimulatedClient, VirtualTime
from coordinator.fleets.simulated_jobs import Outcome
from coordinator.fleets.trace_file import Trace, TracedRound, read_trace
from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, Model, OpenRound, Result, Silence, Terms, encode_model, singly
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import RunPlan, Task, Tasks
from coordinator.rounds.records import InFlight, Training
from coordinator.rounds.step import Step, make_task
from coordinator.rounds.trace import TraceLine
from coordinator.workers.pool import WorkerPool
from edge_client.wire.arrays import BytesPayload
from strategies.params import Tensors


def make_replay(
    path: Path,
    run_plan: RunPlan,
    pool: WorkerPool,
    clients: Sequence[SimulatedClient],
    clock: VirtualTime,
    clients_per_job: int,
) -> tuple[RunPlan, ReplayedFleet | ReplayedAsynchronousFleet]:
    """The plan with the cohorts of the trace in `path`, and a fleet whose clients answer as it says.

    Raises:
        UserError: the trace does not fit.
    """
    trace = read_trace(path, [client.name for client in clients], run_plan)
    if run_plan.asynchrony is not None:
        return run_plan, ReplayedAsynchronousFleet(pool, clients, trace, path)
    cohorts = {number: each.cohort for number, each in trace.items()}
    fleet = ReplayedFleet(pool, clients, clock, clients_per_job, trace, path)
    return replace(run_plan, cohorts=cohorts), fleet


class ReplayedFleet(SimulatedFleet):
    """A `SimulatedFleet` whose clients answer as recorded. Cohorts come from the plan (`RunPlan.cohorts`)."""

    def __init__(
        self,
        pool: WorkerPool,
        clients: Sequence[SimulatedClient],
        clock: VirtualTime,
        clients_per_job: int,
        trace: Trace,
        path: Path,
    ) -> None:
        super().__init__(pool, clients, clock, clients_per_job)
        self._trace = trace
        self._path = path
        self._deciding: Mapping[int, tuple[int, TraceLine]] = {}
        self._further: Sequence[tuple[int, Task, TraceLine]] = ()

    def find_open_round(self, round_number: int) -> OpenRound | None:
        require_round(self._trace, round_number, self._path)
        return None

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        rejected = {at for at, (_, line) in self._deciding.items() if line.outcome != "accepted"}
        further = deque(self._further)
        for result in singly(super().results({*excluded, *rejected})):
            if isinstance(result, Answer):
                order, _ = self._deciding[result.task.position]
                while further and further[0][0] < order:
                    yield _reject(*further.popleft()[1:])
            yield result
        for _, task, line in further:
            yield _reject(task, line)

    def _foresee(
        self, tasks: Tasks, clients: Sequence[SimulatedClient], model: Model, terms: Terms
    ) -> Outlook:
        lines: dict[int, list[tuple[int, TraceLine]]] = {at: [] for at in range(len(tasks))}
        for order, line in enumerate(self._trace[tasks.shared.round].lines):
            lines[line.position].append((order, line))
        # A client that uploaded several times counts by its accepted update if it has one, else by its first line.
        self._deciding = {
            at: next((each for each in own if each[1].outcome == "accepted"), own[0])
            for at, own in lines.items()
        }
        self._further = sorted(
            (
                (order, tasks[at], line)
                for at, own in lines.items()
                for order, line in own
                if order != self._deciding[at][0]
            ),
            key=lambda each: each[0],
        )
        deciding = [self._deciding[at] for at in range(len(tasks))]
        silent = {at: line.reason for at, (_, line) in enumerate(deciding) if line.outcome == "silent"}
        return Outlook(
            np.array([line.seconds for _, line in deciding]),
            silent,
            np.array([order for order, _ in deciding]),
        )

    def _judge(self, outcome: Outcome) -> Outcome:
        assert self._cohort is not None
        positions = list(outcome.accepted)
        answers = dict(outcome.answers)
        if positions:
            accepted = accept(self._cohort, positions, list(outcome.accepted.values()))
            answers |= {each.task.position: [each] for each in accepted.answers()}
        recorded = {
            at: [_as_recorded(self._deciding[at][1], each[0].task, each)] for at, each in answers.items()
        }
        return replace(outcome, answers=recorded, accepted={})


def _reject(task: Task, line: TraceLine) -> Answer:
    rejection = Rejection(line.client, intake.parse_reason(line.reason), "as recorded")
    return Answer(task, rejection, line.bytes, line.seconds)


def _as_recorded(line: TraceLine, task: Task, answers: Sequence[Answer]) -> Answer:
    """The answer that a line records, given those that the client gives here."""
    if line.outcome != "accepted":
        return _reject(task, line)
    accepted = [each for each in answers if not isinstance(each.verdict, Rejection)]
    return (accepted or answers)[0]


class ReplayedAsynchronousFleet:
    """Implements `rounds.step.AsynchronousFleet` by a trace."""

    def __init__(self, pool: Workers, clients: Sequence[SimulatedClient], trace: Trace, path: Path) -> None:
        self._clients = {client.name: client for client in clients}
        self._trainer = Trainer(pool, self._clients)
        self._trace = trace
        self._path = path
        self._bases: dict[int, Model] = {}
        self._step: Step | None = None
        self._now = 0.0

    def resume(self, in_flight: InFlight, run_plan: RunPlan) -> None:
        """Goes on from a checkpoint."""
        self._now = in_flight.seconds
        for number, params in in_flight.bases.items():
            self._bases[number] = encode_model(params, {})
            self._trainer.add_version(number, self._bases[number], in_flight.bases.keys())

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None

    def clients(self, wanted: int) -> Sequence[str]:
        return list(self._clients)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._clients[name].num_examples for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return encode_model(params, streams)

    def begin(self, step: Step) -> None:
        require_round(self._trace, step.number, self._path)
        self._step = step
        self._bases[step.number] = step.model
        needed = {line.started for line in self._lines_from(step.number)} | {step.number}
        self._bases = {number: model for number, model in self._bases.items() if number in needed}
        self._trainer.add_version(step.number, step.model, needed)

    def results(self) -> Iterator[Answer | Silence]:
        lines = self._traced.lines
        each = [self._working(order, line) for order, line in enumerate(lines)]
        training = [at for at, line in zip(each, lines, strict=True) if line.outcome == "accepted"]
        for working, line in zip(each, lines, strict=True):
            if line.outcome == "silent":
                yield Silence(working.task, line.reason, line.seconds)
                continue
            answers = []
            if line.outcome == "accepted":
                training.remove(working)
                answers = self._train(working, training, line.seconds)
            yield _as_recorded(line, working.task, answers)
        self._trainer.finish_queued()
        self._now += self.simulated_seconds()

    def base(self, task: Task) -> Tensors:
        return self._bases[task.message.round].params

    def started(self) -> int:
        number = self._require_step().number
        started = {(line.started, line.position) for line in self._lines_from(number)}
        return sum(at == number for at, _ in started)

    def in_flight(self) -> InFlight:
        number = self._require_step().number
        later = {line.started for line in self._lines_from(number + 1) if line.started <= number}
        return InFlight(self._now, 0, (), {at: self._bases[at].params for at in sorted(later)})

    def simulated_seconds(self) -> float:
        return max((line.seconds for line in self._traced.lines), default=0.0)

    def _train(self, working: Working, waiting: Sequence[Working], seconds: float) -> list[Answer]:
        """What the client uploads. `waiting`: those that answer after it."""
        expected = self._require_step().terms.expected
        return [
            Answer(
                working.task,
                intake.check(BytesPayload(payload), working.task, expected),
                len(payload),
                seconds,
            )
            for payload in self._trainer.uploads(working, waiting)
        ]

    @property
    def _traced(self) -> TracedRound:
        return self._trace[self._require_step().number]

    def _lines_from(self, number: int) -> Iterator[TraceLine]:
        """Lines of this and all later rounds."""
        return (line for at, traced in self._trace.items() if at >= number for line in traced.lines)

    def _working(self, order: int, line: TraceLine) -> Working:
        step = self._require_step()
        base = self._bases[line.started].base
        task = make_task(step.run_plan, line.started, base, line.client, line.position)
        training = Training(line.client, line.started, order, line.seconds, None)
        return Working(training, task)

    def _require_step(self) -> Step:
        assert self._step is not None  # begun
        return self._step


def require_round(trace: Trace, number: int, path: Path) -> TracedRound:
    """The trace of a round. Raises: UserError: it ends before."""
    if number not in trace:
        raise UserError(
            f"{path}: ends after round {len(trace)}, and this run goes on; expected a line of round {number}"
        )
    return trace[number]
