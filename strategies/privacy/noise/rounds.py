"""Correlated noise for tensors, round by round, as a source of each round's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.privacy.noise.additive import Normals
from strategies.privacy.noise.correlated import CorrelatedNoise
from strategies.privacy.noise.secure import Floats


class CorrelatedRounds:
    """The noise of a run whose rounds are numbered from 1, drawn anew from seeds or a key wherever the run goes on.

    Each tensor has a stream of its own, which is played through from the first round, so going on in round t costs t rounds of noise once.
    `generator`: a generator for the vector of a number of the tensor of a number, the same whenever it is asked for.
    """

    def __init__(self, noise: CorrelatedNoise, generator: Callable[[int, int], Normals]) -> None:
        self._noise = noise
        self._generator = generator
        self._streams: dict[int, tuple[int, tuple[int, ...], Iterator[Floats]]] = {}

    def round(self, number: int) -> _Round:
        """The source of a round's noise. It gives the tensors' values in the order in which they are asked for."""
        return _Round(self, number)

    def tensor(self, round_number: int, tensor: int, size: tuple[int, ...]) -> Floats:
        """The noise of a tensor in a round, for standard Gaussian vectors."""
        played, known, stream = self._streams.get(tensor, (round_number, size, None))
        if stream is None or played >= round_number or known != size:
            played, stream = (
                0,
                self._noise.stream(lambda vector: self._generator(vector, tensor).standard_normal(size)),
            )
        for _ in range(played, round_number):
            values = next(stream)
        self._streams[tensor] = round_number, size, stream
        return values


class _Round:
    def __init__(self, rounds: CorrelatedRounds, number: int) -> None:
        self._rounds, self._number = rounds, number
        self._tensors = 0

    def standard_normal(self, size: tuple[int, ...]) -> Floats:
        self._tensors += 1
        return self._rounds.tensor(self._number, self._tensors - 1, size)
