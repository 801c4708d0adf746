"""Rollouts over the real device API, on both databases: 20 devices in one process, a good release and a bad one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.db.events import since
from coordinator.db.store import Database
from coordinator.errors import Refusal
from coordinator.rollouts import controller, plan, queries, reports, service
from coordinator.rollouts.gates import Gates
from coordinator.rollouts.plan import Filter
from coordinator.rollouts.tables import MemberRow, RolloutRow
from coordinator.rounds.pooling import MAX_LOSS
from edge_client.wire.device import ReleaseEvaluation, ReleaseReport
from edge_client.wire.rollouts import NO_MODEL
from tests.support.device_world import Refused, World, serving, sqlite
from tests.support.long import LONG
from tests.support.rollout_devices import MemoryReleases, RolloutDevice

pytestmark = pytest.mark.slow

GOOD, BAD = 2, 3


class Fleet:
    """20 devices that run version 1, and a coordinator that reconciles on demand."""

    def __init__(self, world: World, count: int = 20) -> None:
        self.world = world
        self.releases = MemoryReleases(*(("digits", version) for version in range(1, 6)))
        self.devices = [self._device(f"device-{number:02}") for number in range(count)]

    def _device(self, name: str) -> RolloutDevice:
        device = RolloutDevice(
            self.world.enrol(name),
            self.releases,
            active=("earlier", 1),
            accuracy={GOOD: 0.95, BAD: 0.5, 4: 0.96},
        )
        device.check_in()
        return device

    def start(self, version: int, **terms: Any) -> RolloutRow:
        return service.start(self.world.services, self.releases.releases(), "digits", version, **terms)

    def turn(self) -> bool:
        return controller.reconcile(self.world.services, self.releases)

    def round(self) -> int:
        """All check in, then the coordinator reconciles; how many devices received something."""
        heard = sum(bool(device.check_in()) for device in self.devices)
        self.turn()
        return heard

    def until(self, rollout: RolloutRow, *states: str, rounds: int = 20) -> RolloutRow:
        self.turn()
        for _ in range(rounds):
            if self.now(rollout).state in states:
                break
            self.round()
        found = self.now(rollout)
        assert found.state in states, (found, self.standings(rollout))
        return found

    def now(self, rollout: RolloutRow) -> RolloutRow:
        found = self.world.services.database.read(partial(queries.find, rollout=rollout.id))
        assert found is not None
        return found

    def standings(self, rollout: RolloutRow) -> dict[str, str]:
        members = self.world.services.database.read(partial(queries.members_of, rollout=rollout.id))
        return {member.device: member.standing for member in members}

    def phases(self, rollout: RolloutRow) -> list[list[str]]:
        members = self.world.services.database.read(partial(queries.members_of, rollout=rollout.id))
        last = max(member.phase for member in members)
        return [[each.device for each in members if each.phase == at] for at in range(last + 1)]

    def versions(self) -> list[int | None]:
        return [device.version for device in self.devices]

    def named(self, *ids: str) -> list[RolloutDevice]:
        return [device for device in self.devices if device.id in ids]

    def events(self) -> list[str]:
        return [row.event for row in self.world.services.database.read(lambda at: since(at, 0, 10_000))]


@pytest.fixture
def fleet(tmp_path: Path, database: Database) -> Iterator[Fleet]:
    with serving(tmp_path, database) as world:
        yield Fleet(world)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Fleet]:
    """Four devices, on SQLite alone."""
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        yield Fleet(world, 4)


def test_a_good_release_goes_through_all_phases(fleet: Fleet) -> None:
    made = fleet.start(GOOD)
    fleet.turn()
    assert [len(each) for each in fleet.phases(made)] == [1, 1, 8, 10]
    seen = []
    while fleet.now(made).state == "running":
        fleet.round()
        seen.append(sum(version == GOOD for version in fleet.versions()))
    assert fleet.now(made).state == "finished"
    assert set(fleet.versions()) == {GOOD}
    assert sorted(set(seen)) == [1, 2, 10, 20]
    assert all(len(device.offers) == 1 for device in fleet.devices)
    events = fleet.events()
    assert events.count("rollout_phase_opened") == 4 and events.count("release_active") == 20
    assert fleet.round() == 0


def test_a_release_whose_accuracy_is_bad_stops_at_the_first_gate_and_goes_back(fleet: Fleet) -> None:
    made = fleet.start(BAD, percents=(10, 50, 100))
    halted = fleet.until(made, "halted")
    assert halted.phase == 0 and "accuracy is 0.5000, the champion's 0.9000" in str(halted.reason)
    first = fleet.phases(made)[0]
    assert {device.version for device in fleet.named(*first)} == {BAD}
    fleet.until(made, "rolled_back")
    assert set(fleet.versions()) == {1}
    assert {fleet.standings(made)[device] for device in first} == {"rolled_back"}
    assert sum(len(device.offers) for device in fleet.devices) == 2 * len(first)
    events = fleet.events()
    assert (
        events.index("rollout_halted")
        < events.index("release_rolled_back")
        < events.index("rollout_rolled_back")
    )


def test_a_release_that_fails_its_self_test_is_halted_and_not_tried_again(small: Fleet) -> None:
    for device in small.devices:
        device.broken = frozenset({GOOD})
    made = small.start(GOOD, percents=(50, 100))
    small.until(made, "rolled_back")
    failed = [device for device in small.devices if device.offers]
    assert [len(device.offers) for device in failed] == [1, 1] and set(small.versions()) == {1}
    again = small.start(GOOD, percents=(100,))
    assert {small.standings(again)[device.id] for device in failed} == {"barred"}
    for device in small.devices:
        device.broken = frozenset()
    small.until(again, "finished")
    assert [len(device.offers) for device in failed] == [1, 1]
    assert [device.version for device in failed] == [1, 1] and small.versions().count(GOOD) == 2


def test_a_closed_rollout_is_not_changed_by_a_later_one_of_the_same_version(small: Fleet) -> None:
    halted = small.start(BAD, percents=(50, 100))
    small.until(halted, "rolled_back")
    before = small.standings(halted)
    assert sorted(before.values()) == ["rolled_back", "rolled_back", "waiting", "waiting"]
    again = small.start(BAD, percents=(100,), gates=Gates(max_accuracy_drop=None))
    small.until(again, "finished")
    small.round()
    assert set(small.versions()) == {BAD}
    assert small.standings(halted) == before
    assert small.now(halted).state == "rolled_back"


def test_a_device_that_failed_is_let_try_once_more(small: Fleet) -> None:
    broken = small.devices[0]
    broken.broken = frozenset({GOOD})
    made = small.start(GOOD, percents=(100,), gates=Gates(install=0.5))
    small.until(made, "finished")
    assert small.standings(made)[broken.id] == "failed"
    for heard in (2, 3):
        service.force(small.world.services, made.id, broken.id)
        assert small.round() == 0  # not before it is signed
        assert small.round() == 1
        for _ in range(3):
            small.round()
        assert len(broken.offers) == heard and broken.offers[-1].force
        assert small.standings(made)[broken.id] == ("failed" if heard == 2 else "active")
        broken.broken = frozenset()
    assert broken.version == GOOD
    with pytest.raises(Refusal, match="active"):
        service.force(small.world.services, made.id, broken.id)


def test_a_paused_rollout_reaches_nobody_new_until_it_goes_on(small: Fleet) -> None:
    made = small.start(GOOD, percents=(25, 100))
    small.turn()
    service.change_state(small.world.services, made.id, "paused")
    small.turn()
    assert small.round() == 0
    service.change_state(small.world.services, made.id, "running")
    small.turn()
    assert small.round() == 1
    service.change_state(small.world.services, made.id, "paused")
    for _ in range(3):
        small.round()
    assert small.versions().count(GOOD) == 1
    with pytest.raises(Refusal, match="it is paused"):
        service.change_state(small.world.services, made.id, "paused")
    service.change_state(small.world.services, made.id, "running")
    small.until(made, "finished")


def test_a_rollout_paused_before_its_first_phase_begins_when_it_goes_on(small: Fleet) -> None:
    made = small.start(GOOD)
    service.change_state(small.world.services, made.id, "paused")
    assert small.until(made, "paused").phase == -1 and small.round() == 0
    service.change_state(small.world.services, made.id, "running")
    small.until(made, "finished")


@pytest.mark.parametrize(("keep", "versions"), [(False, [1, 1, 1, 1]), (True, [1, 1, 2, 2])])
def test_an_aborted_rollout_goes_back_or_keeps(small: Fleet, keep: bool, versions: list[int]) -> None:
    made = small.start(GOOD, percents=(50, 100), gates=Gates(soak_seconds=600))
    small.turn()
    small.round()
    service.change_state(small.world.services, made.id, "aborted", keep=keep)
    small.turn()
    for _ in range(3):
        small.round()
    assert sorted(map(int, filter(None, small.versions()))) == versions
    assert small.now(made).state == "aborted" and small.round() == 0


def test_a_finished_rollout_can_be_taken_back_while_it_is_the_newest(small: Fleet) -> None:
    made = small.start(GOOD, percents=(100,))
    small.until(made, "finished")
    service.change_state(small.world.services, made.id, "aborted")
    small.turn()
    small.round()
    assert set(small.versions()) == {1}
    newer = small.start(4, percents=(100,))
    small.until(newer, "finished")
    with pytest.raises(Refusal, match="it is aborted"):
        service.change_state(small.world.services, made.id, "aborted")


def test_several_rollouts_are_taken_back_one_after_the_other(small: Fleet) -> None:
    """Of one version for devices that came later, and of the version before that too."""
    first, *others = small.devices
    made = [
        small.start(GOOD, percents=(100,), device_filter=Filter(ids=tuple(device.id for device in others))),
    ]
    small.until(made[0], "finished")
    for version in (GOOD, 4):
        made.append(small.start(version, percents=(100,)))
        small.until(made[-1], "finished")
    assert set(small.versions()) == {4}
    with pytest.raises(Refusal, match=f"rollout {made[2].id} of digits:4 is newer, and finished"):
        service.change_state(small.world.services, made[0].id, "aborted")
    seen = []
    for rollout in reversed(made):
        service.change_state(small.world.services, rollout.id, "aborted")
        small.turn()
        for _ in range(4):
            small.round()
        seen.append([first.version, *{device.version for device in others}])
    assert seen == [[GOOD, GOOD], [1, GOOD], [1, 1]]
    assert small.round() == 0


def test_two_rollouts_are_taken_back_at_once(small: Fleet) -> None:
    """Each device goes back twice, by what is signed each time; going back once signs nothing anew."""
    for version in (GOOD, 4):
        small.until(small.start(version, percents=(100,)), "finished")
    newer, older = small.world.services.database.read(partial(queries.newest, limit=2))
    service.change_state(small.world.services, newer.id, "aborted")
    service.change_state(small.world.services, older.id, "aborted")
    small.turn()
    for _ in range(8):
        small.round()
    assert small.versions() == [1] * 4 and small.round() == 0
    for device in small.devices:
        back = [offer.version for offer in device.offers if offer.action == "roll_back"]
        assert back[0] == GOOD and back[-1] == 1


def test_devices_that_go_back_do_not_keep_the_others_waiting_for_a_signature(small: Fleet) -> None:
    made = small.start(GOOD, percents=(100,))
    small.until(made, "finished")
    service.change_state(small.world.services, made.id, "aborted")
    small.turn()
    for device in small.devices:
        assert [offer.action for offer in device.check_in()] == ["roll_back"]
        device.check_in()
    assert not small.world.services.database.read(queries.unsigned_revisions)


def test_silent_devices_are_left_behind_after_the_deadline_and_caught_up_with(small: Fleet) -> None:
    made = small.start(GOOD, percents=(100,), gates=Gates(answered=0.5, deadline_seconds=600))
    small.turn()
    quiet = small.devices.pop()
    for _ in range(3):
        small.round()
    assert small.now(made).state == "running"
    small.world.clock.pass_seconds(600)
    small.turn()
    assert small.now(made).state == "finished"
    assert [offer.version for offer in quiet.check_in()] == [GOOD]


def test_a_silent_device_that_took_a_bad_release_goes_back_when_it_returns(small: Fleet) -> None:
    made = small.start(BAD, percents=(100,), gates=Gates(deadline_seconds=600))
    small.turn()
    late = small.devices.pop()
    assert [offer.version for offer in late.check_in()] == [BAD]
    small.round()
    small.round()
    small.world.clock.pass_seconds(600)
    small.until(made, "halted")
    for _ in range(3):
        small.round()
    assert small.now(made).state == "halted"  # one was told and did not say
    assert [(offer.action, offer.version) for offer in late.check_in()] == [("roll_back", 1)]
    assert late.version == 1
    late.check_in()
    small.until(made, "rolled_back")


def test_a_device_that_never_installed_the_offer_does_not_delay_a_rollback(small: Fleet) -> None:
    made = small.start(BAD, percents=(100,), gates=Gates(deadline_seconds=600))
    small.turn()
    deaf = small.devices.pop()
    assert deaf.client.check_in(wire="1.3", releases=deaf.reports()).releases
    small.round()
    small.round()
    small.world.clock.pass_seconds(600)
    small.until(made, "halted")
    small.round()
    assert not deaf.check_in()
    small.until(made, "rolled_back")


def test_a_bad_first_release_leaves_devices_without_a_model_once_it_is_withdrawn(small: Fleet) -> None:
    """There is no version to go back to; until those who release say so, a device keeps what it has, and says why."""
    for device in small.devices:
        device.active, device.broken = None, frozenset({GOOD})
    first, second, *_ = small.devices
    first.broken = frozenset()
    made = small.start(GOOD, percents=(100,), gates=Gates(install=1.0))
    small.turn()
    assert [offer.version for offer in first.check_in()] == [GOOD] and first.version == GOOD
    first.check_in()
    small.until(made, "halted")
    for _ in range(3):
        small.round()
    assert (small.now(made).state, first.version) == ("halted", GOOD)
    members = small.world.services.database.read(partial(queries.members_of, rollout=made.id))
    assert [(each.standing, each.code) for each in members if each.device == first.id] == [
        ("active", "not_withdrawn")
    ]
    stays = small.world.services.database.read(partial(queries.rollback_failures, rollout=made.id))
    assert [(each.code, each.devices, each.device) for each in stays] == [("not_withdrawn", 1, first.id)]
    small.releases.released.remove(("digits", GOOD))
    small.until(made, "rolled_back")
    assert small.versions() == [None] * 4
    assert {(offer.action, offer.version) for offer in first.offers} == {
        ("install", GOOD),
        ("roll_back", NO_MODEL),
    }
    assert not small.world.services.database.read(partial(queries.rollback_failures, rollout=made.id))
    assert small.standings(made)[first.id] == "rolled_back" and small.standings(made)[second.id] == "failed"
    assert small.round() == 0
    small.until(small.start(4, percents=(100,)), "finished")
    assert small.versions() == [4] * 4


def test_who_could_not_fetch_a_bad_release_does_not_hold_up_a_rollback(small: Fleet) -> None:
    """It still says that it installs the release, also once it was told that what it runs is right."""
    made = small.start(BAD, percents=(100,), gates=Gates(deadline_seconds=600))
    small.turn()
    slow = small.devices.pop()
    assert slow.client.check_in(wire="1.3", releases=slow.reports()).releases
    slow.last = ReleaseReport(made.id, "digits", BAD, "installing", "disk", "no room")
    slow.client.check_in(wire="1.3", releases=slow.reports())
    small.round()
    small.round()
    small.world.clock.pass_seconds(600)
    small.until(made, "halted")
    busy = slow.last
    assert [(offer.action, offer.version) for offer in slow.check_in()] == [("roll_back", 1)]
    slow.last = busy
    slow.check_in()
    small.until(made, "rolled_back")


def test_nobody_hears_of_what_is_not_signed(small: Fleet) -> None:
    small.releases.refuses = True
    made = small.start(GOOD)
    assert small.now(made).state == "created"
    small.turn()
    assert small.now(made).state == "running" and small.round() == 0
    small.releases.refuses = False
    small.turn()
    assert small.round() == 1


def test_a_decision_not_signed_before_a_crash_is_signed_after_it(tmp_path: Path) -> None:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        fleet = Fleet(world, 4)
        made = fleet.start(GOOD, percents=(50, 100))
        world.services.database.write(lambda at: controller._decide(at, made.id, world.clock())).result()
        assert not fleet.releases.documents
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        for device in fleet.devices:
            device.client = type(device.client)(world.url, device.id)
        fleet.world = world
        assert fleet.until(made, "finished").phase == 1
    assert set(fleet.versions()) == {GOOD} and all(len(device.offers) == 1 for device in fleet.devices)


def test_a_decision_taken_again_changes_nothing(small: Fleet) -> None:
    made = small.start(GOOD)
    while small.turn():
        pass
    document, row = small.releases.documents["digits"], small.now(made)
    small.world.clock.pass_seconds(60)
    assert not small.turn()
    assert (small.releases.documents["digits"], small.now(made)) == (document, row)


def test_devices_that_were_shut_out_do_not_hold_a_phase_up(small: Fleet) -> None:
    made = small.start(GOOD, percents=(50, 100))
    small.turn()
    gone, stays = small.phases(made)[0]
    small.world.set_device(gone, state="revoked")
    small.named(stays)[0].check_in()
    small.named(stays)[0].check_in()
    small.turn()
    assert small.now(made).phase == 1


def test_the_next_rollout_takes_devices_over_and_goes_back_to_what_they_had(small: Fleet) -> None:
    small.until(small.start(GOOD, percents=(100,)), "finished")
    bad = small.start(BAD, percents=(50, 100))
    small.until(bad, "rolled_back")
    assert set(small.versions()) == {GOOD}
    small.until(small.start(4, percents=(100,)), "finished")
    assert set(small.versions()) == {4}


def test_a_halted_rollout_whose_silent_device_goes_on_to_the_next_one_is_over(small: Fleet) -> None:
    made = small.start(BAD, percents=(50, 100))
    small.turn()
    late = small.named(small.phases(made)[0][0])[0]
    for _ in range(2):
        small.round()
    assert small.now(made).state == "halted"
    small.devices.remove(late)
    assert late.version == BAD
    for _ in range(2):
        small.round()
    assert small.now(made).state == "halted"
    newer = small.start(4, percents=(100,), gates=Gates(answered=0))
    small.turn()
    assert [(offer.action, offer.version) for offer in late.check_in()] == [("install", 4)]
    small.devices.append(late)
    small.until(made, "rolled_back")
    small.until(newer, "finished")
    assert set(small.versions()) == {4}


def test_every_offer_is_signed_however_many_rollouts_there_were(small: Fleet) -> None:
    deaf, other = small.devices[0].client, small.devices[1].id
    gates, device_filter = Gates(answered=0, deadline_seconds=1), Filter(ids=(deaf.id, other))
    first = small.start(GOOD, percents=(100,), device_filter=device_filter, gates=gates)
    small.turn()
    for _ in range(2):
        small.devices[1].check_in()
    small.world.clock.pass_seconds(1)
    small.turn()
    assert small.now(first).state == "finished"
    offers = []
    for _ in range(9):
        offers += deaf.check_in(wire="1.3").releases
        made = small.start(4, device_filter=Filter(ids=(other,)))
        service.change_state(small.world.services, made.id, "aborted", keep=True)
        small.turn()
        named = {
            device for entry in small.releases.documents["digits"].rollouts for device in entry.devices or ()
        }
        assert bool(deaf.check_in(wire="1.3").releases) == (deaf.id in named)
    assert offers and deaf.id not in named


def test_a_device_that_failed_alone_can_be_let_try_again(small: Fleet) -> None:
    alone = small.devices[0]
    alone.broken = frozenset({GOOD})
    device_filter = Filter(ids=(alone.id,))
    small.until(small.start(GOOD, device_filter=device_filter), "rolled_back")
    alone.broken = frozenset()
    again = small.start(GOOD, device_filter=device_filter)
    small.turn()
    assert small.round() == 0 and small.now(again).state == "running"
    service.force(small.world.services, again.id, alone.id)
    small.until(again, "finished")
    assert alone.version == GOOD


def test_one_rollout_of_a_model_at_a_time(small: Fleet) -> None:
    made = small.start(GOOD)
    with pytest.raises(Refusal, match=f"rollout {made.id} of digits:2 is created"):
        small.start(4)


@pytest.mark.parametrize(
    ("version", "terms", "code"),
    [(9, {}, "unknown_release"), (GOOD, {"device_filter": Filter(groups=("none",))}, "no_devices")],
)
def test_releases_that_cannot_be_rolled_out_are_refused(
    small: Fleet, version: int, terms: dict[str, Any], code: str
) -> None:
    with pytest.raises(Refusal) as refused:
        small.start(version, **terms)
    assert refused.value.code == code


def test_a_release_that_is_withdrawn_halts_its_rollout(small: Fleet) -> None:
    made = small.start(GOOD, percents=(50, 100), gates=Gates(soak_seconds=600))
    small.turn()
    small.round()
    small.releases.released = [("digits", 1)]
    assert "digits:2 was withdrawn" in str(small.until(made, "halted").reason)
    small.until(made, "rolled_back")
    assert set(small.versions()) == {1}


def test_a_withdrawn_release_is_installed_by_nobody_and_holds_nothing_else_up(small: Fleet) -> None:
    made = small.start(GOOD, percents=(50, 100))
    small.turn()
    small.round()
    small.releases.released = [("digits", 1)]
    service.change_state(small.world.services, made.id, "aborted")
    small.turn()
    small.round()
    assert set(small.versions()) == {1}


def test_devices_of_an_older_wire_hear_of_no_release(small: Fleet) -> None:
    small.start(GOOD, percents=(100,))
    small.turn()
    assert small.devices[0].client.check_in(wire="1.2").releases == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"golden_accuracy": 1.5},
        {"evaluation": ReleaseEvaluation(0, 0, 0.0)},
        {"evaluation": ReleaseEvaluation(10, 11, 0.0)},
        {"evaluation": ReleaseEvaluation(10, 5, -1.0)},
        {"evaluation": ReleaseEvaluation(10**400, 5, 1.0)},
        {"version": 0},
        {"version": 10**30},
    ],
)
def test_figures_that_cannot_be_are_refused(small: Fleet, bad: dict[str, Any]) -> None:
    report = ReleaseReport(**{"rollout": "r", "model": "digits", "version": 2, "standing": "active", **bad})
    with pytest.raises(Refused, match="malformed"):
        small.devices[0].client.check_in(wire="1.3", releases=(report,))


@pytest.mark.parametrize("labels", [40, 10**12])
def test_one_device_that_praises_a_bad_release_does_not_outweigh_the_others(
    small: Fleet, labels: int
) -> None:
    made = small.start(BAD, percents=(100,), gates=Gates(confidence=None))
    small.turn()
    liar = small.devices.pop().client
    liar.check_in(wire="1.3")
    figures = ReleaseEvaluation(labels, labels, 0.0, 0, float(labels))
    report = ReleaseReport(made.id, "digits", BAD, "active", evaluation=figures)
    liar.check_in(wire="1.3", releases=(report,))
    halted = small.until(made, "halted")
    assert "accuracy is 0.6250, the champion's 0.6750, over 160 labels" in str(halted.reason)


def test_a_loss_without_bounds_leaves_the_figures_numbers(small: Fleet) -> None:
    """Two of the largest sums would come to infinity, and infinity less infinity fails no gate."""
    made = small.start(GOOD, percents=(100,), gates=Gates(max_accuracy_drop=None, max_loss_increase=0.1))
    small.turn()
    for liar in (small.devices.pop().client, small.devices.pop().client):
        liar.check_in(wire="1.3")
        figures = ReleaseEvaluation(40, 40, 1e308, 40, 1e308)
        liar.check_in(
            wire="1.3", releases=(ReleaseReport(made.id, "digits", GOOD, "active", evaluation=figures),)
        )
    found = small.world.services.database.read(partial(queries.tallies, rollout=made.id))[0]
    assert found.loss_sum == found.champion_loss_sum == 2 * 40 * MAX_LOSS


def test_a_rollout_is_for_no_more_devices_than_a_document_names(
    small: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_DEVICES", 3)
    with pytest.raises(Refusal, match="4 devices match, and a rollout names at most 3"):
        small.start(GOOD)


def test_held_devices_are_woken_when_their_phase_opens(small: Fleet) -> None:
    world = small.world
    world.start_run("r")
    device = small.devices[0]
    made = small.start(GOOD, percents=(100,))
    got: list[Any] = []
    poll = threading.Thread(
        target=lambda: got.append(
            device.client.check_in(wire="1.3", wait_seconds=50, releases=device.reports())
        )
    )
    poll.start()
    while not world.services.signals.count_waiting("device:"):
        threading.Event().wait(0.01)
    small.turn()
    poll.join()
    assert [offer.rollout for offer in got[0].releases] == [made.id]


def test_a_held_device_hears_an_offer_at_once_and_is_held_after_that(small: Fleet) -> None:
    small.world.start_run("r")
    small.start(GOOD, percents=(100,))
    small.turn()
    client = small.devices[0].client
    first = client.check_in(wire="1.3", wait_seconds=50)
    assert first.releases and first.hold and first.next_seconds == 0
    again = client.check_in(wire="1.3", wait_seconds=0.01)
    assert again.releases == first.releases and again.hold


def test_the_thread_carries_a_rollout_through(small: Fleet) -> None:
    services = small.world.services
    thread = controller.RolloutThread(services, small.releases)
    thread.start()
    made = small.start(GOOD, percents=(50, 100))
    while small.now(made).state != "finished":
        for device in small.devices:
            device.check_in()
    assert set(small.versions()) == {GOOD}
    services.signals.close()
    thread.close()


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["check_in"] * 6 + ["turn"] * 3 + ["force", "pause", "resume", "pass"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@pytest.mark.long
def test_whatever_happens_nobody_repeats_a_failed_release_and_phases_only_grow(tmp_path: Path) -> None:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        fleet = Fleet(world, 6)
        examples = iter(range(1000))

        @settings(max_examples=25 if LONG else 8, deadline=None, suppress_health_check=list(HealthCheck))
        @given(STEPS, st.sets(st.integers(0, 5)), st.floats(0.3, 1))
        def law(steps: list[Step], broken: set[int], install: float) -> None:
            _check_law(fleet, f"m{next(examples)}", steps, broken, install)

        law()


def _check_law(fleet: Fleet, model: str, steps: list[Step], broken: set[int], install: float) -> None:
    services, releases = fleet.world.services, fleet.releases
    releases.released.append((model, 1))
    devices = [
        RolloutDevice(each.client, releases, model, broken=frozenset({1} if at in broken else ()))
        for at, each in enumerate(fleet.devices)
    ]
    made = service.start(
        services, releases.releases(), model, 1, percents=(10, 40, 100), gates=Gates(install=install)
    )
    forced = [0] * len(devices)
    phase = -1
    for what, at in steps:
        _step(fleet, made, devices[at], what, forced, at)
        opened = fleet.now(made).phase
        assert opened >= phase
        phase = opened
        received = [member for member in _members(fleet, made) if member.told]
        assert all(member.phase <= phase for member in received)
    for at, device in enumerate(devices):
        tried = [offer for offer in device.offers if offer.action == "install"]
        assert all(offer.force for offer in tried[1:]) or at not in broken
        if at in broken:
            assert len(tried) <= 1 + forced[at]


def _step(
    fleet: Fleet, made: RolloutRow, device: RolloutDevice, what: str, forced: list[int], at: int
) -> None:
    services = fleet.world.services
    steering: dict[str, Callable[[], Any]] = {
        "force": lambda: service.force(services, made.id, device.id),
        "pause": lambda: service.change_state(services, made.id, "paused"),
        "resume": lambda: service.change_state(services, made.id, "running"),
    }
    if what == "turn":
        fleet.turn()
    elif what == "pass":
        fleet.world.clock.pass_seconds(1800)
    elif what == "check_in":
        _check_in(fleet, device)
    else:
        try:
            steering[what]()
        except Refusal:
            return
        forced[at] += what == "force"


def _check_in(fleet: Fleet, device: RolloutDevice) -> None:
    """As over the API, without its request; and what is offered is signed."""
    services = fleet.world.services
    heard = services.database.write(
        lambda at: reports.check_in(at, device.id, device.reports(), services.clock())
    ).result()
    for offer in heard.offers:
        if offer.model != device.model:
            continue
        assert fleet.releases.says(offer, device.id)
        device.offers.append(offer)
        device._follow(offer)


def _members(fleet: Fleet, made: RolloutRow) -> list[MemberRow]:
    return fleet.world.services.database.read(partial(queries.members_of, rollout=made.id))


# -- a device's disk --


def test_a_device_that_lost_its_model_gets_its_instruction_again(small: Fleet) -> None:
    """Its check-in says that nothing runs, and not why: its pointers were lost."""
    rollout = small.start(GOOD, percents=[100])
    small.until(rollout, "finished")
    lost = small.devices[0]
    lost.active = lost.spare = lost.last = None
    (offer,) = lost.check_in()
    assert (offer.rollout, offer.version) == (rollout.id, GOOD)
    assert small.standings(rollout)[lost.id] == "installing"
    assert lost.check_in() == ()
    assert small.standings(rollout)[lost.id] == "active"


def test_a_device_that_lost_its_previous_version_gets_its_instruction_again(small: Fleet) -> None:
    rollout = small.start(BAD, percents=[100])
    small.until(rollout, "rolled_back")
    lost = small.devices[0]
    lost.active = lost.spare = None
    (offer,) = lost.check_in()
    assert (offer.version, offer.action) == (1, "roll_back")


def test_a_damaged_slot_is_known_within_a_check_in(small: Fleet) -> None:
    rollout = small.start(GOOD, percents=[100])
    small.until(rollout, "finished")
    device = small.devices[0]
    device.active, device.spare = ("earlier", 1), None
    device.last = ReleaseReport(rollout.id, "digits", GOOD, "installing", "damaged", "on its disk")
    (offer,) = device.check_in()
    assert offer.version == GOOD
    assert small.standings(rollout)[device.id] == "installing"
    device.check_in()
    assert small.standings(rollout)[device.id] == "active"
