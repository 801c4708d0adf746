"""The command `fedloop` with a server that waits up to 2 ms for a batch to become full, as other servers do: a comparison for ours.

python -m tests.bench.serving_window serving start …
"""

from __future__ import annotations

from coordinator.commands import cli
from coordinator.serving.served import ServedVersion

WINDOW_SECONDS = 0.002
_dispatch = ServedVersion.dispatch


def dispatch_after_window(version: ServedVersion) -> None:
    """Dispatches if the rows that wait fill a batch or the oldest of them has waited long enough; else looks again then."""
    queue = version._queue
    if not queue.rows:
        return
    loop = version.loop
    if queue.rows < queue.max_batch:
        oldest = min(entry[2].arrived for each in queue._priorities.values() for entry in each.heap)
        left = WINDOW_SECONDS - (loop.time() - oldest)
        if left > 0:
            loop.call_later(left, dispatch_after_window, version)
            return
    _dispatch(version)


if __name__ == "__main__":
    ServedVersion.dispatch = dispatch_after_window  # type: ignore[method-assign]
    cli.main()
