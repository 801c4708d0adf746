"""`python -P -m models.pretrain.launch RANKS JOB.json`: torchrun on this machine, in a tree that dies together.

torchrun's agent runs inside this process, which dies with its parent; the ranks die with the agent. Across
machines use `torchrun … --no-python python -P -m models.pretrain.worker JOB.json` with your own rendezvous.
"""

from __future__ import annotations

import os
import sys

from edge_client import process


def main() -> None:
    process.die_with_parent()
    ranks, job = sys.argv[1:]
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    # a restart would otherwise meet the dead ranks' TCPStore again and hang
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run

    run.main(
        [
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--local-addr=127.0.0.1",
            "--no-python",
            # -P, so that a models.py in the working directory is not taken for our package
            *(sys.executable, "-P", "-m", "models.pretrain.worker", job),
        ]
    )


if __name__ == "__main__":
    main()
