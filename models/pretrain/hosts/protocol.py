"""How the launcher and the members on the hosts talk: JSON lines, on a member's standard input and output.

    launcher -> {"environment": …, "job": …, "token": …, "address": …, "reach": …}    once, at the start
    member   -> {"ready": true}       the host sees the run's folder, reaches the other hosts and has imported torch
    launcher -> {"serve": true}       to one member, which opens a rendezvous and answers {"endpoint": "HOST:PORT"}
    launcher -> {"start": …}          a `Fleet`: its processes train until {"ended": STATUS}, and it waits for the next one
    launcher -> {"stop": true}        they finish the step and save it
    launcher -> {"abort": true}       they are killed
    member   -> {"unreachable": …}    it does not reach that rendezvous any more
    member   -> {"error": …}          before it ends, when it cannot take part
    both     -> {"alive": true}       every second

Other lines of a member are reports of its processes.
"""

ALIVE_SECONDS = 1.0

MEMBER_SILENT_SECONDS = 30.0
"""A member that says nothing for so long is lost."""

LAUNCHER_SILENT_SECONDS = 20.0
"""A member ends when the launcher says nothing for so long: before the launcher counts it as lost and others take over."""

TOKEN = ".host-token"
"""File in the run's folder that every host must see."""
