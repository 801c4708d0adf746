"""A worker's side: what it sends to every shard's server, and what it does when one dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.futures import Future

from models.pretrain.server import replica
from models.pretrain.server.replica import Reply, failed_there
from models.pretrain.server.rules import Contribution
from models.pretrain.server.settings import Servers


class ServersGone(ConnectionError):
    """No replica of a shard answers."""


class Client:
    """One worker's.

    Args:
        shards: the module's parameters as `shard.split` gives them; every answer changes them in place.
    """

    def __init__(self, worker: int, servers: Servers, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        self.worker, self.servers, self.shards = worker, servers, shards
        self.failovers = 0
        self._alive = [servers.replicas_of(shard) for shard in range(servers.servers)]
        self._versions = [0] * servers.servers

    def push(self, clock: int, loss: float) -> int:
        """Sends the gradients of all parameters, waits until it may go on, and gives the clock to go on with."""
        arguments = [
            (Contribution(self.worker, clock, version, loss, _gradients(parameters)),)
            for version, parameters in zip(self._versions, self.shards, strict=True)
        ]
        return max(reply.clock for reply in self._take(self._ask(replica.push, arguments)))

    def final(self) -> None:
        """Waits until everybody's updates were made, and takes the params."""
        self._take(self._ask(replica.final, [()] * len(self.shards)))

    def records(self) -> list[dict[str, Any]]:
        """What the servers say of the training, by shard."""
        return self._ask(replica.record, [()] * len(self.shards))

    def leave(self) -> None:
        """Tells all replicas that still live."""
        for name in (name for names in self._alive for name in names):
            with suppress(RuntimeError):
                rpc.rpc_sync(name, replica.leave, args=(self.worker,), timeout=self.servers.timeout)

    def _take(self, replies: list[Reply]) -> list[Reply]:
        with torch.no_grad():
            for number, (reply, parameters) in enumerate(zip(replies, self.shards, strict=True)):
                self._versions[number] = reply.version
                for parameter, value in zip(parameters, reply.values, strict=True):
                    parameter.copy_(value)
        return replies

    def _ask(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All shards at once, then those that did not answer once more, at their next replica."""
        asked = [self._start(shard, function, given) for shard, given in enumerate(arguments)]
        replies = []
        for shard, (future, given) in enumerate(zip(asked, arguments, strict=True)):
            reply = _wait(future)
            while reply is None:
                self._next_replica(shard)
                reply = _wait(self._start(shard, function, given))
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
    """The answer; None: there is none, or the server does not lead."""
    if future is None:
        return None
    try:
        return future.wait()
    except RuntimeError as error:
        if failed_there(error):
            raise
        return None


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [
        torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach().cpu()
        for parameter in parameters
    ]
