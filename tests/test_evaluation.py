"""Evaluation: forwards of a trained model that do not learn, and the time around them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.script.compute_facts import model_facts
from headway.trace.events.intervals import inside, merged, without
from headway.trace.recording import gaps as gap_rows
from headway.trace.recording.basis import LEARNS, ROLLOUT, basis_of, evaluations, gradients_of, mark_learning
from tests.training_rows import Thread


def marked(thread):
    """Return the rows of a thread, of which the forwards that learn are marked, its gradients and its steps."""
    rows = thread.rows()
    gradients, basis = gradients_of(rows), basis_of(rows)
    mark_learning(rows, gradients, basis)
    return rows, gradients, basis


def between(thread):
    """Return (start, duration) of each gap that is the script's own time."""
    rows, gradients, basis = marked(thread)
    bounds = np.concatenate([[0], basis.ends_ns])
    found = gap_rows.gaps(rows, bounds, evaluations(rows, gradients), gradients, basis)
    return list(zip(found.start_ns.tolist(), found.duration_ns.tolist(), strict=True))


def spans(thread):
    """Return (begin, end) of each span of evaluation, and how many forwards learn."""
    rows, gradients, _ = marked(thread)
    found = evaluations(rows, gradients)
    ends = (found.start_ns + found.duration_ns).tolist()
    return list(zip(found.start_ns.tolist(), ends, strict=True)), int(
        (rows.seq[rows.name == FORWARD] & LEARNS > 0).sum()
    )


FORWARD = gap_rows.FORWARD


def test_from_eval_to_train_is_evaluation():
    thread = Thread()
    thread.train(3, iterator=0)
    begin = thread.mode(training=False)
    for batch in range(4):
        thread.batch(1, seq=batch)
        thread.forward(grad=False, training=False)
    thread.batch(1, seq=-1)
    thread.add("host.gc")
    end = thread.mode(training=True)
    thread.train(3, iterator=0)

    assert spans(thread) == ([(begin, end)], 6)


def test_sampling_with_gradients_on_in_training_mode_is_evaluation():
    thread = Thread()
    expected = []
    for _ in range(4):
        thread.train(5, iterator=0)
        begin = thread.now_ns
        for _ in range(6):
            thread.forward()
        expected.append((begin, thread.now_ns))
    thread.train(1, iterator=0)

    assert spans(thread) == (expected, 21)


def test_episodes_of_unlike_lengths_learn_in_all_their_forwards():
    thread = Thread()
    for length in (3, 9, 4, 7, 2, 8, 3, 5, 12, 6, 1, 4):
        for _ in range(length):
            thread.forward()
        thread.train(1, iterator=0)

    assert spans(thread) == ([], 64 + 12)


def test_more_micro_batches_in_some_steps_are_no_samples():
    thread = Thread()
    for step in range(20):
        for _ in range(4 if step % 10 == 0 else 1):
            thread.forward()
            thread.backward()
        thread.update()

    assert spans(thread)[0] == []


def test_without_a_change_of_mode_it_reaches_from_its_loaders_first_batch_to_the_last_one():
    thread = Thread()
    thread.train(3, iterator=0)
    thread.add("host.gc")
    begin = thread.batch(1)
    for batch in range(4):
        thread.forward(grad=False)
        thread.batch(1, seq=batch + 1 if batch < 3 else -1)
    end = thread.now_ns
    thread.add("host.gc")
    thread.train(3, iterator=2)

    assert spans(thread) == ([(begin, end)], 6)


def test_evaluation_before_the_first_and_after_the_last_step_is_seen():
    thread = Thread()
    thread.mode(training=False)  # a model that is made in eval mode
    thread.add("host.gc", 500)
    first = thread.batch(1)
    thread.forward(grad=False, training=False)
    thread.forward(grad=False, training=False)
    first_end = thread.mode(training=True)
    thread.train(3, iterator=0)
    last = thread.mode(training=False)
    thread.forward(grad=False, training=False)
    last_end = thread.now_ns
    thread.add("checkpoint.save")

    assert spans(thread) == ([(first, first_end), (last, last_end)], 3)


def test_a_wrapper_that_stays_in_eval_mode_still_learns():
    thread = Thread()
    thread.train(5, iterator=0, training=False)

    assert spans(thread) == ([], 5)


def test_an_evaluation_with_gradients_enabled_is_told_from_the_step_behind_it():
    thread = Thread()
    thread.train(2)
    begin = thread.mode(training=False)
    thread.forward(training=False)
    thread.forward(training=False)
    end = thread.mode(training=True)
    thread.train(2)

    assert spans(thread) == ([(begin, end)], 4)


def test_a_teacher_and_a_targets_single_forward_are_part_of_the_step():
    thread = Thread()
    for step in range(4):
        thread.batch(0, seq=step)
        thread.forward(model=1, grad=False, training=False)  # other parameters
        thread.forward(model=0, grad=False)  # its own target, on the batch of the step
        thread.train()

    assert spans(thread) == ([], 4)


def test_a_model_of_which_copies_are_trained_is_evaluated_over_a_loader_of_its_own():
    thread, expected = Thread(), []
    for copy in (1, 2):
        thread.train(3, iterator=2 * copy, model=copy)
        begin = thread.batch(9)
        for batch in range(3):
            thread.forward(model=0, training=False)
            thread.batch(9, seq=batch + 1 if batch < 2 else -1)
        expected.append((begin, thread.now_ns))
    for step in range(4):  # a teacher that is asked one batch of unlabelled examples in each step
        thread.train(iterator=2)
        thread.batch(11, seq=step)
        thread.forward(model=7, grad=False, training=False)

    assert spans(thread) == (expected, 10)


def test_rollouts_of_the_trained_model_are_evaluation():
    thread, expected = Thread(), []
    for _ in range(3):
        begin = thread.now_ns
        for _ in range(5):
            thread.forward(grad=False)
            thread.add("host.gc", 30)
        expected.append((begin, thread.now_ns - 30))
        thread.train(2)

    assert spans(thread) == (expected, 6)
    rows, gradients, _ = marked(thread)
    assert evaluations(rows, gradients, acts=True).seq.tolist() == [ROLLOUT] * 3


def test_a_policy_that_is_tested_on_a_loader_or_in_eval_mode_does_not_act():
    thread = Thread()
    for step in range(4):
        thread.train(2)
        if step % 2:
            thread.mode(training=False)
            thread.forward(grad=False, training=False)
            thread.mode(training=True)
        else:
            thread.batch(1)
            thread.forward(grad=False)
            thread.batch(1, seq=-1)
    thread.train(1)
    rows, gradients, _ = marked(thread)

    assert evaluations(rows, gradients, acts=True).seq.tolist() == [0] * 4


def test_micro_batches_that_wait_for_their_backward_learn():
    thread = Thread()
    for _ in range(3):
        for _ in range(4):
            thread.forward()
        for _ in range(4):
            thread.backward()
        thread.update()

    assert spans(thread) == ([], 12)


def test_spans_that_the_script_marks_join_those_that_were_found():
    thread = Thread()
    thread.train(2)
    begin = thread.now_ns
    thread.events.append(("eval.mark", begin, 100, {"corr": -1}))
    thread.forward(grad=False, training=False)
    thread.add("host.gc", 90)
    thread.train(2)

    assert spans(thread) == ([(begin, begin + 100)], 4)


def test_the_scripts_time_ends_with_the_first_forward_and_leaves_evaluation_out():
    thread, expected = Thread(), []
    thread.train()
    for _ in range(2):
        begin = thread.now_ns
        thread.add("host.gc", 50)
        expected.append((begin, 50))
        thread.mode(training=False)
        for _ in range(3):
            thread.forward(grad=False, training=False)
        thread.mode(training=True)
        expected.append((thread.now_ns, 20))
        thread.add("host.gc", 20)
        thread.train()

    assert between(thread) == expected


def test_waiting_between_two_forwards_of_a_step_is_the_scripts_time_and_computing_is_not():
    thread, ms = Thread(), 1_000_000
    thread.train()
    first = thread.now_ns
    for cpu_ns in (-1, ms // 10, 2 * ms, ms // 10, 2 * ms):
        thread.add("forward", 100, corr=0, seq=3, bytes=cpu_ns)
        thread.now_ns += 3 * ms
    thread.backward(fresh=True)
    thread.update()

    waited = [(start_ns - first, ns) for start_ns, ns in between(thread)]
    assert waited == [(100, 3 * ms), (2 * (3 * ms + 100) + 100, 3 * ms)]


@given(st.lists(st.tuples(st.sampled_from("tTeEfnNgbuvs"), st.integers(1, 9)), max_size=60))
def test_whatever_happens_spans_are_disjoint_and_hold_no_learning(events):
    thread = Thread()
    for kind, length in events:
        if kind in "tTeE":
            thread.mode(training=kind in "tT")
        elif kind in "fv":
            thread.forward(grad=kind == "f", training=kind == "f", duration_ns=length)
        elif kind in "nN":
            thread.batch(int(kind == "N"), seq=length - 2)
        elif kind == "g":
            thread.add("host.gc", length)
        elif kind == "b":
            thread.backward(fresh=True)
        elif kind == "u":
            thread.update()
        else:
            thread.train()
    rows, gradients, basis = marked(thread)
    found = evaluations(rows, gradients)
    start, end = found.start_ns, found.start_ns + found.duration_ns
    learning = (rows.name == FORWARD) & (rows.seq & LEARNS > 0)

    assert (start[1:] >= end[:-1]).all()
    assert not inside(rows.start_ns[learning], (start, end)).any()
    assert not inside(gradients.start_ns, (start, end)).any()
    assert not inside(basis.update_start_ns, (start, end)).any()


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(intervals, intervals)
def test_sets_of_time_agree_with_moments_counted_one_by_one(one, other):
    def built(pairs):
        starts = np.array([begin for begin, _ in pairs], np.int64)
        return merged(starts, starts + np.array([length for _, length in pairs], np.int64))

    def moments(found):
        return {m for begin, end in zip(found[0].tolist(), found[1].tolist(), strict=True) for m in range(begin, end)}

    a, b = built(one), built(other)

    assert moments(a) == {m for begin, length in one for m in range(begin, begin + length)}
    assert moments(without(a, b)) == moments(a) - moments(b)
    assert [m for m in range(40) if inside(np.array([m]), a)[0]] == sorted(moments(a))


def test_a_model_whose_caller_draws_actions_and_takes_their_log_prob_acts():
    model, states = torch.nn.Linear(4, 2), torch.randn(3, 4)

    def policy(rewards=1.0):
        actions = torch.distributions.Categorical(logits=model(states))
        facts = model_facts(model, (states,))
        return facts["acts"], rewards * actions.log_prob(actions.sample())

    def generator():
        words = torch.distributions.Categorical(logits=model(states))
        return model_facts(model, (states,))["acts"], words.log_prob(words.sample())

    def classifier():
        return model_facts(model, (states,))["acts"], model(states)

    assert policy()[0]
    assert not generator()[0]
    assert not classifier()[0]
