"""A process that writes numbered rows into a database from many threads and prints each number once it is durable.

Started by tests that kill it: `python -m tests.support.acknowledging_writer URL THREADS FIRST`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Connection, insert

from coordinator.db.store import Database
from coordinator.db.tables import serials
from edge_client.processes.process import die_with_parent


def main(url: str, threads: int, first: int) -> None:
    """Never ends by itself."""
    database = Database(url)
    numbers = itertools.count(first)
    workers = [threading.Thread(target=_write, args=(database, numbers)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _write(database: Database, numbers: itertools.count[int]) -> None:
    for number in numbers:
        database.write(_row(number)).result()
        os.write(1, f"{number}\n".encode())


def _row(number: int) -> Callable[[Connection], object]:
    values = {"serial_number": str(number), "device_group": "g", "added_at": datetime.now(UTC)}
    return lambda connection: connection.execute(insert(serials).values(values))


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
