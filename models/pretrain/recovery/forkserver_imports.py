"""The forkserver's preloaded imports: everything a worker needs.

The forkserver's children hold the pipe by which it would notice that the launcher is gone, so the kernel signals it
instead. Only the forkserver may import this module.
"""

from edge_client.processes.process import die_with_parent
from models.pretrain import training_process
from models.pretrain.recovery import elastic

__all__ = ["elastic", "training_process"]

die_with_parent()
