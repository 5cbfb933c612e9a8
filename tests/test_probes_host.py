"""Host probes: garbage collections, log records and compilation, each once and for as long as it took."""

import gc
import inspect
import logging
import time

import torch

from headway.trace.events.vocabulary import FROM_CACHE, GC_CALLED
from tests.recorded import recording, rows
from tests.spawn import in_fork

MS = 1_000_000


def test_every_collection_is_recorded_with_its_generation_and_whether_it_was_called_for(tmp_path):
    with recording(tmp_path) as session:
        gc.disable()
        try:
            before = session.probes.garbage.so_far_ns()
            gc.collect(0)
            gc.collect(2)
            inspect.unwrap(gc.collect)(1)  # as the interpreter does by itself
            spent = session.probes.garbage.so_far_ns() - before
        finally:
            gc.enable()
        mine = rows(tmp_path)["host.gc"][-3:]

    assert [row["a"] for row in mine] == [GC_CALLED, 2 + GC_CALLED, 1]
    assert sum(row["duration_ns"] for row in mine) == spent


def test_a_forked_child_gets_no_ring_for_its_collections_alone(tmp_path):
    with recording(tmp_path):
        assert in_fork(gc.collect) == 0

    assert len(list((tmp_path / "rings").iterdir())) == 1


def test_a_slow_handler_is_recorded_and_a_level_that_is_off_is_not(tmp_path):
    class Slow(logging.Handler):
        def emit(self, record):
            time.sleep(0.003)

    logger = logging.getLogger("tests.slow")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = Slow()
    logger.addHandler(handler)
    try:
        with recording(tmp_path):
            logger.info("one")
            logger.debug("none")
            logger.warning("two")
    finally:
        logger.removeHandler(handler)
    found = rows(tmp_path)["host.logging"]

    assert [row["a"] for row in found] == [logging.INFO, logging.WARNING]
    assert all(row["duration_ns"] >= 3 * MS for row in found)


def test_compilation_is_recorded_also_after_a_reset_of_dynamo(tmp_path):
    with recording(tmp_path):
        for size in (2, 3):
            torch._dynamo.reset()
            torch.compile(torch.nn.Linear(size, size), backend="eager")(torch.ones(1, size))
    torch._dynamo.reset()

    assert len(rows(tmp_path)["host.compile"]) == 2


def test_what_the_compile_cache_held_is_told_from_what_was_compiled(tmp_path):
    counters = torch._dynamo.utils.counters
    for hits, misses in ((0, 0), (2, 0), (1, 1)):

        def backend(graph, _, hits=hits, misses=misses):
            counters["inductor"]["fxgraph_cache_hit"] += hits
            counters["inductor"]["fxgraph_cache_miss"] += misses
            return graph.forward

        run = tmp_path / f"{hits}-{misses}"
        with recording(run):
            torch._dynamo.reset()
            torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))

        (row,) = rows(run)["host.compile"]
        assert row["a"] == (FROM_CACHE if hits and not misses else 0)
