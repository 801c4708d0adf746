"""Where released versions went: the rollouts and the devices at the end of a lineage."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from coordinator.db.tables import devices
from coordinator.registry.lineage import Edge, Graph, Node
from coordinator.rollouts.tables import rollout_members, rollouts

_MAX_ROLLOUTS = 20
"""Of one version: its newest."""


def add_rollouts(connection: Connection, graph: Graph) -> None:
    """Adds to the released versions of a graph their rollouts, and the number of devices that run each."""
    for version in [node for node, facts in graph.nodes.items() if facts.get("kind") == "inference"]:
        model, _, number = version.ref.rpartition(":")
        query = (
            select(rollouts.c.id, rollouts.c.state, rollouts.c.created_at)
            .where(rollouts.c.model == model, rollouts.c.version == int(number))
            .order_by(rollouts.c.number.desc())
            .limit(_MAX_ROLLOUTS)
        )
        found = connection.execute(query).all()
        if not found:
            continue
        running = Node("devices", version.ref)
        graph.nodes[running] = {"count": devices_running(connection, model, int(number))}
        for row in found:
            rollout = Node("rollout", row.id)
            graph.nodes[rollout] = {"state": row.state, "created_at": row.created_at.isoformat()}
            graph.edges |= {Edge(version, rollout, "rollout"), Edge(rollout, running, "devices")}


def devices_running(connection: Connection, model: str, version: int) -> int:
    """Number of active devices that last reported this version as active, of those that rollouts gave it to."""
    member, newer, latest = rollout_members, rollout_members.alias(), rollouts.alias()
    superseded = (
        select(newer.c.device)
        .join(latest, latest.c.id == newer.c.rollout)
        .where(newer.c.device == member.c.device, newer.c.standing == "active")
        .where(latest.c.model == model, latest.c.number > rollouts.c.number)
        .exists()
    )
    query = (
        select(func.count(func.distinct(member.c.device)))
        .select_from(member.join(rollouts, rollouts.c.id == member.c.rollout))
        .join(devices, devices.c.id == member.c.device)
        .where(rollouts.c.model == model, rollouts.c.version == version)
        .where(member.c.standing == "active", devices.c.state == "active", ~superseded)
    )
    return int(connection.execute(query).scalar_one())
