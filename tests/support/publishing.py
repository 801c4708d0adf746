"""A process that changes a repository of releases, to be killed in the middle of it.

python -m tests.support.publishing REPOSITORY TARGETS ROOT|- {PATH=FILE}…     publishes what was signed
python -m tests.support.publishing REPOSITORY rollouts MODEL                  signs an empty document of rollouts
python -m tests.support.publishing REPOSITORY renew SECONDS                   renews as if so much time had passed
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from coordinator.context.services import utc_now
from coordinator.releases.repository import Repository


def main(folder: str, what: str, *rest: str) -> None:
    if what == "rollouts":
        Repository(Path(folder), utc_now).set_rollouts(rest[0], {"model": rest[0], "rollouts": []})
    elif what == "renew":
        later = utc_now() + timedelta(seconds=float(rest[0]))
        Repository(Path(folder), lambda: later).renew(later)
    else:
        roots = [] if rest[0] == "-" else [Path(rest[0]).read_bytes()]
        files = dict(each.split("=", 1) for each in rest[1:])
        repository = Repository(Path(folder), utc_now)
        repository.publish(Path(what).read_bytes(), {path: Path(file) for path, file in files.items()}, roots)


if __name__ == "__main__":
    main(*sys.argv[1:])
