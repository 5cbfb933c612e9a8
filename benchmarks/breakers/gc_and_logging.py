"""Garbage that is waited for and logs that are looked at: what the host does beside the steps."""

import gc
import io
import logging
import os
import sys
import tempfile
import time
import weakref
from pathlib import Path

import torch
from _training import Training, chosen

FREED = []


class Node:
    """A cycle that tells when it is collected."""

    def __init__(self, number=0):
        self.number, self.self = number, self

    def __del__(self):
        FREED.append(self.number)


def make_until_freed():
    before = len(FREED)
    while len(FREED) == before:
        Node()


def gc_waits_for_automatic():
    """The loop makes garbage until an automatic collection has freed some: without one it never ends.

    Remedies: host.gc
    """
    training = Training()
    for step in range(30):
        make_until_freed()
        training.step(torch.full((4, 8), 1 + step / 10))
    training.finish(gc.isenabled())


def gc_fork_and_collect():
    """A child forked in mid-training waits for an automatic collection of its own.

    Remedies: host.gc
    """
    training = Training()
    for step in range(30):
        if step % 10 == 7:
            child = os.fork()
            if child == 0:
                make_until_freed()
                os._exit(step)
            training.loss = os.waitpid(child, 0)[1] / 256
        training.step(torch.full((4, 8), 1 + training.loss / 100))
    training.finish()


def gc_threshold_zero():
    """Collection is switched off by a threshold of 0, and finalizers act when the script collects.

    Remedies: host.gc
    """
    gc.set_threshold(0)
    training = Training()
    for step in range(40):
        Node(step)
        if step % 9 == 8:
            gc.collect()
        training.step(torch.full((4, 8), 1 + len(FREED) / 10))
    training.finish(gc.get_threshold(), FREED[:9])


class Plain:
    """A cycle that tells nobody."""

    def __init__(self):
        self.self = self


def gc_weak_reference():
    """After `gc.collect()` the loop asks whether an old cycle is gone; it was made before the first step.

    Remedies: host.gc
    """
    training, node = Training(), Plain()
    alive = weakref.ref(node)
    for step in range(30):
        if step == 12:
            del node
        gc.collect()
        training.step(torch.full((4, 8), 1.0 if alive() is None else 2.0))
    training.finish()


class Writer:
    def __init__(self):
        self.me = self
        self.lines = 0

    def __del__(self, print=print):
        print("writer closed after", self.lines, flush=True)


def gc_finaliser_at_exit():
    """An object in a cycle, made before the first step, writes its last line when the interpreter ends.

    Remedies: host.gc
    """
    training, writer = Training(), Writer()
    for _ in range(30):
        training.step(torch.full((4, 8), 1.0))
        writer.lines += 1
    training.finish()


def named_logger(handler):
    """Return the logger `job` with that handler."""
    logger = logging.getLogger("job")
    logger.setLevel("INFO")
    logger.addHandler(handler)
    return logger


def log_file_read_back():
    """The loop asks how long the log file is, and what its last line says.

    Remedies: host.logging
    """
    path = tempfile.mktemp()
    logging.basicConfig(filename=path, level="INFO", format="%(message)s")
    training = Training()
    for step in range(40):
        logging.info("step %d", step)
        size = os.path.getsize(path)
        with open(path) as file:
            line = file.read().splitlines()[-1]
        training.step(torch.full((4, 8), 1 + size / 400 + int(line.split()[1]) / 40))
    training.finish()


def log_to_string():
    """The log goes to a string in memory, and the loop looks at its length.

    Remedies: host.logging
    """
    text = io.StringIO()
    logging.basicConfig(stream=text, level="INFO", format="%(message)s")
    training = Training()
    for step in range(40):
        logging.info("step %d", step)
        training.step(torch.full((4, 8), 1 + len(text.getvalue()) / 400))
    training.finish()


class Ending(logging.Handler):
    def emit(self, record):
        if record.args[0] == 23:
            training.finish()
            sys.exit(5)


def log_handler_exits():
    """A handler ends the program at a certain message, with a code of its own.

    Remedies: host.logging
    """
    global training
    training, logger = Training(), named_logger(Ending())
    for step in range(40):
        training.step(torch.full((4, 8), 1 + step / 40))
        logger.info("step %d", step)


class Steering(logging.Handler):
    def emit(self, record):
        training.optimizer.param_groups[0]["lr"] *= 0.9


def log_handler_steers():
    """A handler lowers the learning rate when a message says that the loss is low.

    Remedies: host.logging
    """
    global training
    training, logger = Training(), named_logger(Steering())
    for step in range(40):
        logger.info("step %d", step)
        training.step(torch.full((4, 8), 1 + step / 40))
    training.finish()


class Slow(logging.FileHandler):
    def emit(self, record):
        time.sleep(1e-3)
        super().emit(record)


def log_level_changed():
    """Level, formatter and filters of a handler change right after a message.

    Remedies: host.logging
    """
    path = tempfile.mktemp()
    handler = Slow(path)
    training, logger = Training(), named_logger(handler)
    for step in range(40):
        handler.setLevel("INFO")
        handler.setFormatter(logging.Formatter(f"{step} %(message)s"))
        logger.propagate = False
        logger.info("step %d", step)
        logger.info("again %d", step)
        handler.setLevel("ERROR")
        handler.setFormatter(None)
        training.step(torch.full((4, 8), 1 + step / 40))
    logging.shutdown()
    training.finish(Path(path).read_text())


class State:
    value = 0

    def __str__(self):
        return f"state {self.value}"


def log_mutable_arguments():
    """Arguments of a message change right after the call, as do objects that are the message.

    Remedies: host.logging
    """
    path = tempfile.mktemp()
    logging.basicConfig(filename=path, level="INFO", format="%(message)s %(extra)s")
    training, losses, state, extra = Training(), [], State(), [0]
    for step in range(40):
        logging.info("losses %s", losses, extra={"extra": extra})
        logging.info(state, extra={"extra": "none"})
        losses.append(step)
        state.value, extra[0] = step, step
        training.step(torch.full((4, 8), 1 + step / 40))
    logging.shutdown()
    training.finish(Path(path).read_text())


if __name__ == "__main__":
    chosen(globals())
