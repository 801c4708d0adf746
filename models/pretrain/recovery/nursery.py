"""What the server imports that a launcher's processes are forked from: everything they need, and its own end.

Its children hold what would tell the server that the launcher is gone, so it has the kernel tell it. To be imported
by that server only.
"""

from edge_client.process import die_with_parent
from models.pretrain import worker
from models.pretrain.recovery import elastic

__all__ = ["elastic", "worker"]

die_with_parent()
