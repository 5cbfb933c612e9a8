"""What is done after a failure, rung by rung."""

from hypothesis import given
from hypothesis import strategies as st

from headway.fault.supervise import ACTIONS, RecoveryLimits, Seen, decide
from tests.refusals import refused

ERROR = "ValueError: bad row"
PLENTY = RecoveryLimits(restarts_left=9)

failures = st.builds(
    Seen, cls=st.sampled_from(["user", "oom", "hang", "infra", "preempted"]), step=st.integers(0, 5),
    checkpoint=st.none() | st.integers(0, 5), error=st.sampled_from(["", ERROR, "KeyError: 'x'"]),
    hosts=st.sampled_from([(), ("a",), ("b",), ("a", "b")]), confidence=st.floats(0, 1),
    action=st.sampled_from(list(ACTIONS)),
)  # fmt: skip
limits = st.builds(
    RecoveryLimits, restarts_left=st.integers(0, 3), standbys=st.integers(0, 2), spare_hosts=st.integers(0, 2),
    updated=st.booleans(), can_replay=st.booleans(),
)  # fmt: skip


@given(incident=failures, history=st.lists(failures, max_size=5), allowed=limits)
def test_an_action_is_always_one_that_the_limits_allow(incident, history, allowed):
    decision = decide(incident, history, allowed)

    assert decision.action in ACTIONS
    assert decision.reason
    assert (decision.action == "stop") >= (allowed.restarts_left == 0)
    if decision.action in ("standby", "exclude"):
        room = allowed.standbys if decision.action == "standby" else allowed.spare_hosts
        assert 0 < len(incident.hosts) <= room
    assert decision.action != "rollback" or allowed.updated
    assert decision.action != "replay" or allowed.can_replay


def test_the_same_error_of_the_script_at_the_same_step_stops_the_job():
    seen = Seen("user", step=7, error=ERROR)

    assert decide(seen, [], PLENTY).action == "restart"
    assert decide(seen, [seen], PLENTY).action == "stop"
    assert decide(seen, [Seen("user", step=6, error=ERROR)], PLENTY).action == "restart"
    assert decide(seen, [seen], RecoveryLimits(restarts_left=9, updated=True)).action == "rollback"


def test_an_error_before_the_first_step_is_tried_again_as_often_as_was_asked():
    seen = Seen("user", step=0, error="ConnectionError: the hub does not answer")

    assert decide(seen, [seen] * 6, PLENTY).action == "restart"


def test_restarts_without_a_checkpoint_or_a_further_step_stop_the_job():
    stuck = Seen("infra", step=40, checkpoint=30)

    assert [decide(stuck, [stuck] * count, PLENTY).action for count in range(4)] == ["restart"] * 3 + ["stop"]
    assert decide(Seen("infra", step=40, checkpoint=31), [stuck] * 5, PLENTY).action == "restart"
    assert decide(Seen("infra", step=41, checkpoint=30), [stuck] * 5, PLENTY).action == "restart"
    assert decide(stuck, [stuck] * 3, RecoveryLimits(restarts_left=1, can_replay=True)).action == "replay"


def test_a_host_goes_when_it_is_blamed_twice_and_at_once_on_certain_evidence():
    one, other = Seen("infra", step=1, hosts=("a",)), Seen("infra", step=2, hosts=("b",))
    room = RecoveryLimits(restarts_left=9, standbys=1, spare_hosts=1)
    unsure = Seen("infra", step=2, hosts=("a",), confidence=0.3)

    assert decide(one, [other], room).action == "restart"
    assert decide(unsure, [one], room).action == "restart"
    assert decide(one, [one], room).action == "standby"
    assert decide(one, [one], RecoveryLimits(restarts_left=9, spare_hosts=1)).action == "exclude"
    assert decide(one, [one], PLENTY).action == "restart"
    assert decide(Seen("infra", hosts=("a",), certain=True), [], room).action == "standby"


test_limits_that_cannot_be_are_refused = refused(
    (lambda: RecoveryLimits(restarts_left=-1), "restarts_left is -1; it must be at least 0"),
    (lambda: RecoveryLimits(restarts_left=1, no_progress=0), "no_progress is 0"),
)
