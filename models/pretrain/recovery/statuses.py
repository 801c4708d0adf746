"""Exit statuses of training processes and of those that start them, as sysexits.h has them where it does. No torch here."""

UNREACHABLE = 69
"""EX_UNAVAILABLE: the rendezvous cannot be reached, or is gone."""

PREEMPTED = 75
"""EX_TEMPFAIL: preempted after saving its work."""

REFUSED = 78
"""EX_CONFIG: the job is rejected; a restart would not help."""

HUNG = 79
"""No step ended in time."""

STOPPED = 128 + 15
"""Stopped by SIGTERM when there was nothing to save."""
