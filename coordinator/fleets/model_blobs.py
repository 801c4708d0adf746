"""The model of a round as blobs that devices download: its params, the rule's streams, and the part of each narrower model class.

Blobs are held until the rows of tasks refer to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from coordinator.rounds import intake
from coordinator.rounds.fleet import Model
from coordinator.scheduling.deployments import Deployment
from coordinator.scheduling.offers import ModelBlobs, Part
from coordinator.storage.blobs import Blobs
from edge_client.relay.expected import Expected
from edge_client.wire.device import BlobRef
from strategies.params import Tensors, flatten
from strategies.slices import take


class HeldModels:
    """For the thread of one run. `retry`: acts until the disk does not fail, as `RunSession.retry`."""

    def __init__(
        self, blobs: Blobs, retry: Callable[[Callable[[], BlobRef]], BlobRef], deployment: Deployment
    ) -> None:
        self._blobs = blobs
        self._retry = retry
        self._deployment = deployment
        self._stored: dict[str, ModelBlobs] = {}
        self._held = ExitStack()

    def put(
        self, params: Tensors, streams: Mapping[str, Tensors], narrower_bytes: Mapping[str, int]
    ) -> Model:
        """The model, ready to send; those before it are released. `narrower_bytes`: as in `Model`, filled later."""
        self.release()
        stored = self._store(params)
        extra = self._store(flatten(streams)) if streams else None
        self._stored[stored.sha256] = ModelBlobs(stored, extra)
        size = stored.size_bytes + (extra.size_bytes if extra is not None else 0)
        return Model(params, streams, stored.sha256, size, narrower_bytes)

    def of(self, model: Model) -> ModelBlobs:
        """The blobs of a model. `model`: as `put` returned it."""
        return self._stored[model.base]

    def cut(self, names: Iterable[str], params: Tensors, expected: Expected) -> dict[str, Part]:
        """What a round gives the devices of those of these model classes that are narrower. `expected`: of its results."""
        classes = [self._deployment.require_class(name) for name in sorted(set(names)) if name]
        return {
            each.name: Part(
                self._store(take(params, each.shapes)),
                intake.expected_of(expected, each.name).payload_limit_bytes,
            )
            for each in classes
            if each.is_narrower
        }

    def release(self) -> None:
        """Releases the blobs: rows refer to them by now."""
        self._held.close()

    def _store(self, tensors: Tensors) -> BlobRef:
        """Stores tensors as a blob and holds it.

        Raises:
            BlobDamaged: an earlier blob of the same content is damaged; every device would reject it.
        """

        def store() -> BlobRef:
            with self._blobs.reference_lock:
                info = self._blobs.put_arrays(tensors)
                self._held.enter_context(self._blobs.held(info.sha256))
            self._blobs.require_intact(info.sha256)
            return BlobRef(info.sha256, info.size_bytes)

        return self._retry(store)
