"""Assembling: every record becomes one row, in its lane and its step; what is lost is counted."""

import threading

from headway.trace.events.vocabulary import KIND
from headway.trace.rings.records import stems
from headway.trace.rings.ring import LOADER
from tests.rings_made import Process, built, rows


def test_every_record_is_a_row_with_its_columns_and_its_step(tmp_path):
    process = Process(tmp_path)
    process.train(3)
    process.write("checkpoint.save", 7_000, 4096, 0)
    trace = built(tmp_path)

    assert trace.meta["num_steps"] == 3
    assert trace.events["step"][trace.named("optimizer.step")].tolist() == [0, 1, 2]
    waits = trace.named("input.next")
    assert trace.events["step"][waits].tolist() == [0, 1, 2]
    assert trace.events["seq"][waits].tolist() == [0, 1, 2]
    save = trace.where(trace.named("checkpoint.save"))
    assert (save.events["step"][0], save.events["bytes"][0], save.events["kind"][0]) == (3, 4096, KIND["CKPT"])


def test_step_marks_reach_from_update_to_update_and_the_first_from_the_first_wait(tmp_path):
    process = Process(tmp_path)
    begin = process.now_ns
    process.train(2, step_ns=1_000_000)
    marks = rows(built(tmp_path), "step")

    assert marks == [(begin, 1_050_000), (begin + 1_050_000, 1_000_000)]


def test_loads_of_workers_are_lanes_of_their_rank_and_know_their_iterator(tmp_path):
    main = Process(tmp_path)
    worker = Process(tmp_path, role=LOADER)
    worker.recorder.set_worker(1)
    pid = stems(tmp_path / "rings")[0].name.partition("-p")[2]
    for life, iterator in enumerate((7, 8)):
        main.write("input.worker", 0, 3, iterator, 1, int(pid.split("-")[0]))
        worker.write("input.load", 500_000, life, 0, 1, 64)
    trace = built(tmp_path)
    loads = trace.where(trace.named("input.load"))

    assert [trace.lanes[lane] for lane in loads.events["lane"]] == ["loader/1", "loader/1"]
    assert loads.events["group"].tolist() == [3, 3]
    assert loads.events["corr"].tolist() == [7, 8]
    assert loads.events["depth"].tolist() == [0, 0]


def test_overwritten_records_are_one_row_with_their_count(tmp_path):
    process = Process(tmp_path, capacity=16)
    for _ in range(100):
        process.write("host.logging", 10, 20)
    trace = built(tmp_path)
    lost = trace.where(trace.named("dropped"))

    assert int(lost.events["bytes"].sum()) + int(trace.named("host.logging").sum()) == 100
    assert trace.meta["dropped"] == int(lost.events["bytes"].sum()) > 0


def test_the_process_row_covers_everything_on_its_lane(tmp_path):
    process = Process(tmp_path)
    process.train(2)
    process.recorder.close()
    trace = built(tmp_path)
    (start, duration), others = rows(trace, "process")[0], trace.where(~trace.named("process"))

    assert start <= others.span_ns[0]
    assert start + duration >= others.span_ns[1]


def test_a_thread_that_trains_is_the_main_lane_when_the_first_thread_does_not(tmp_path):
    process = Process(tmp_path)
    process.write("host.logging", 100, 20)
    thread = threading.Thread(target=process.train, args=(3,), name="trainer")
    thread.start()
    thread.join()
    trace = built(tmp_path)
    lanes = {trace.name_of(i): trace.lanes[trace.events["lane"][i]] for i in range(len(trace))}

    assert trace.meta["num_steps"] == 3
    assert (lanes["optimizer.step"], lanes["host.logging"]) == ("main", "thread/MainThread")


def test_a_wait_seen_by_autograds_thread_is_the_training_threads(tmp_path):
    process = Process(tmp_path)
    process.train(1)
    thread = threading.Thread(target=process.write, args=("comm.wait", 10, 0, 0, 64))
    thread.start()
    thread.join()
    trace = built(tmp_path)

    assert trace.events["lane"][trace.named("comm.wait")].tolist() == [trace.lanes.index("main")]
