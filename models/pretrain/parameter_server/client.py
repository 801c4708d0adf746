"""The worker's side: pushes to the server of every shard, and fails over when one dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.futures import Future

from models.pretrain.parameter_server import replica
from models.pretrain.parameter_server.replica import Reply, is_remote_error
from models.pretrain.parameter_server.rules import Contribution
from models.pretrain.parameter_server.settings import Servers


class ServersGone(ConnectionError):
    """No replica of a shard answers."""


class Client:
    """The connection of one worker to all shards.

    Args:
        shards: the module's parameters as `shard.split` returns them; every reply updates them in place.
    """

    def __init__(self, worker: int, servers: Servers, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        self.worker, self.servers, self.shards = worker, servers, shards
        self.failovers = 0
        self._alive = [servers.replicas_of(shard) for shard in range(servers.servers)]
        self._versions = [0] * servers.servers

    def push(self, clock: int, loss: float) -> int:
        """Pushes the gradients of all parameters, waits until the worker may continue, and returns its next clock."""
        arguments = [
            (Contribution(self.worker, clock, version, loss, _gradients(parameters)),)
            for version, parameters in zip(self._versions, self.shards, strict=True)
        ]
        return max(reply.clock for reply in self._apply(self._call(replica.push, arguments)))

    def final(self) -> None:
        """Waits until all workers' updates are made, and takes the final params."""
        self._apply(self._call(replica.final, [()] * len(self.shards)))

    def records(self) -> list[dict[str, Any]]:
        """The servers' records of the training, by shard."""
        return self._call(replica.record, [()] * len(self.shards))

    def leave(self) -> None:
        """Announces to all living replicas that this worker is done."""
        for name in (name for names in self._alive for name in names):
            with suppress(RuntimeError):
                rpc.rpc_sync(name, replica.leave, args=(self.worker,), timeout=self.servers.timeout)

    def _apply(self, replies: list[Reply]) -> list[Reply]:
        with torch.no_grad():
            for number, (reply, parameters) in enumerate(zip(replies, self.shards, strict=True)):
                self._versions[number] = reply.version
                for parameter, value in zip(parameters, reply.values, strict=True):
                    parameter.copy_(value)
        return replies

    def _call(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls all shards at once, then retries those that did not answer at their next replica."""
        futures = [self._start(shard, function, args) for shard, args in enumerate(arguments)]
        replies = []
        for shard, (future, args) in enumerate(zip(futures, arguments, strict=True)):
            reply = _wait(future)
            while reply is None:
                self._next_replica(shard)
                reply = _wait(self._start(shard, function, args))
            replies.append(reply)
        return replies

    def _start(
        self, shard: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Future[Any] | None:
        name = self._alive[shard][0]
        try:
            future: Future[Any] = rpc.rpc_async(name, function, args=arguments, timeout=self.servers.timeout)
        except RuntimeError:
            return None
        return future

    def _next_replica(self, shard: int) -> None:
        lost = self._alive[shard].pop(0)
        self.failovers += 1
        if not self._alive[shard]:
            raise ServersGone(
                f"{lost} does not answer and was the last of {self.servers.replicas} replicas of shard {shard}"
            )


def _wait(future: Future[Any] | None) -> Any:
    """The reply; None if there is none, or the server does not lead."""
    if future is None:
        return None
    try:
        return future.wait()
    except RuntimeError as error:
        if is_remote_error(error):
            raise
        return None


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [
        torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach().cpu()
        for parameter in parameters
    ]
