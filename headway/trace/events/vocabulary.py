"""The names of everything the recorder writes: one literal table.

The probes in `runtime/` write fixed-size records that carry a code; the
reader turns codes into names, kinds and columns; `ledger/` maps names to
buckets. All three read this table, nobody else defines an event name.

>>> SPANS["input.next"].kind
'DATA'
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS: tuple[str, ...] = ("COMPUTE", "COLL", "SEND", "RECV", "HOST", "DATA", "CKPT", "OPTIM", "SYNC", "MARK")
"""Values of the `kind` column, by index. COLL = collective, HOST = the host's own work, MARK = bookkeeping."""

KIND: dict[str, int] = {name: index for index, name in enumerate(KINDS)}
"""Kind name -> value of the `kind` column."""


MOVING = (KIND["COLL"], KIND["SEND"], KIND["RECV"])
"""Kinds of what communicates; all but the first between two ranks."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one recorded name means and how its record's four numbers map onto trace columns."""

    code: int
    """Code in the binary record; never reused."""

    kind: str
    """One of `KINDS`."""

    columns: tuple[str, ...] = ()
    """Trace columns that the record's numbers `a, b, c, d` fill, in order; '' skips one."""

    meaning: str = ""
    """One line for the documentation of the run folder."""


BY_EVENTS = ("device.work", "device.unknown")
"""Names of what the events of a device say: when it was at work, and when that is not known."""

BLOCKING = 1
"""What marks a copy to a device that its host waits for."""

READ_AGAIN = 1
"""What marks forks that read data again among headway's own work; a replay leaves them out."""

UNREAD = "the job ended before its first examples were read again"
"""What the facts of a loader say where the last of its readings gave no answer."""

READING_FAILED = "a child that read it again failed, or wanted to write or to send something"
"""What they say where a reading ended without one: a trial of a remedy reads in such a child as well."""

UNASKED = "an IterableDataset: each worker yields all of its data unless its code asks which worker it is in"
"""Why the workers of a stream are left as they are."""

GC_CALLED = 4
"""What a garbage collection's generation is raised by where the script called `gc.collect`."""

FROM_CACHE = 1
"""What marks work of torch.compile that its cache saved the compilation."""

CLOSED, BEHIND_UPDATE, BEHIND_BACKWARD = 0, 1, 2
"""Where in a step a call of the script stands: in neither gap, from an update to the next forward, or from a backward
to the update."""

WAIT_NS = 500_000
"""A shorter time between two forwards of a step is part of computing, whatever the thread did in it."""

STAGE_PARTS: dict[str, str] = {
    "forward": "a pipeline stage's forward",
    "backward": "a pipeline stage's whole backward",
    "input": "the part of a pipeline stage's backward that makes the gradient of its input",
    "weight": "the part of a pipeline stage's backward that makes the gradients of its weights",
}
"""What a pipeline stage computes -> its meaning: F, B, I and W of `headway.sim.pipeline.actions`."""

SPANS: dict[str, Span] = {
    # Bookkeeping.
    "process": Span(1, "MARK", (), "life of the rank's process: fork or exec to exit"),
    "launcher": Span(2, "MARK", (), "life of the launcher: start to exit (rank -1)"),
    "step": Span(3, "MARK", (), "one optimizer update: end of the previous one to its own end"),
    "window": Span(4, "MARK", ("seq",), "steps recorded in depth by the profiler; seq = window number"),
    "dropped": Span(5, "MARK", ("bytes",), "records overwritten before they were drained; bytes = how many"),
    "region": Span(6, "MARK", ("corr", "seq"),
                   "a stretch the script named itself; corr = index of the name, seq = 1 if device events timed it"),
    # Critical segments of a step: they say how long it took, never who owns the time.
    "segment.forward": Span(7, "MARK", ("corr", "seq"),
                            "batch or update until backward; corr = 1 by device events, 0 by the host's clock (derived "
                            "when the run is finalised); seq = n-th in its step"),
    "segment.backward": Span(8, "MARK", ("corr", "seq", "peer"),
                             "one outermost backward; corr and seq as of segment.forward. Raw rows timed by device "
                             "events carry the host's moment of launch as seq; raw c = 1 if the gradients were fresh "
                             "when it began: none, another object, or another version than after the one before"),
    "segment.grad": Span(9, "MARK", ("corr",),
                         "one outermost torch.autograd.grad (corr = 0) or gradient of torch.func (corr = 1)"),
    # What the training thread computes.
    "forward": Span(11, "COMPUTE", ("corr", "seq", "bytes"),
                    "outermost call of a module on the training thread; corr = model (modules that share their first "
                    "trainable parameter are one model; -1 = nothing trainable), seq = sum of 1 if gradients were "
                    "enabled, 2 if module.training was set, 4 if a backward of its step followed (set when finalised); "
                    "bytes = CPU ns of the thread since the forward before it ended, -1 for the first after an update, "
                    "and until a time of at least `WAIT_NS` was seen between two forwards of a step"),
    "graph.replay": Span(12, "MARK", ("corr",), "replay of a captured device graph; corr = graph"),
    "mode": Span(13, "MARK", ("corr", "seq"),
                 "instant: train() or eval() of a whole model; corr = model, seq = 1 for training"),
    "device.work": Span(16, "MARK", ("corr", "seq"),
                        "a device is at work without a pause, by its events; corr = n-th device of the rank, seq = how "
                        "far the host was ahead of its end, ns (raw: the host's moment of launch of its end)"),
    "device.unknown": Span(17, "MARK", ("corr", "seq"),
                           "a device was at work for a part of the time, which its events do not tell; the rest as "
                           "device.work"),
    "optimizer.closure": Span(14, "COMPUTE", ("corr",),
                              "one call of the closure that an optimizer's step was given; corr = optimizer"),
    "eval": Span(15, "MARK", ("corr", "seq"),
                 "derived when the run is finalised: a span of evaluation on the training thread, that is, of forwards "
                 "of a trained model that do not learn; corr = model, seq = 1 if the script marked it, 2 where a "
                 "policy acted in an environment"),
    # Stages of a pipeline: which stage and microbatch a forward or backward is of, never who owns its time.
    **{f"stage.{part}": Span(32 + index, "MARK", ("corr", "seq"), f"{words} of one microbatch; corr = stage, seq = "
                             "microbatch")
       for index, (part, words) in enumerate(STAGE_PARTS.items())},
    # Chunks of a fill job (PipeFill) in the gaps of such a stage, on its training thread.
    "fill.chunks": Span(36, "HOST", ("corr", "seq"),
                        "a fill process ran chunks of another job in a large gap; corr = 0 before the first "
                        "computation of a step, 1 before its first backward; seq = chunks"),
    "fill.late": Span(37, "HOST", (), "the gap was over, and the rank waited for the fill process to return"),
    "step.reroute": Span(39, "HOST", ("corr", "seq"),
                         "a step of replicas of a pipeline that a killed rank interrupted, from its start until the "
                         "others go on without that rank; corr = stage, seq = how often so far"),
    # The optimizer.
    "optimizer.step": Span(10, "OPTIM", ("corr", "seq"),
                           "one optimizer.step(); corr = optimizer, seq = 1 if AMP skipped it. Raw: c, d = start and "
                           "duration of the backward before it, d = 0 for none"),
    # Input. All on the training thread's lane, except input.load and its children inside loader workers.
    "input.next": Span(20, "DATA", ("group", "seq", "peer", "corr"),
                       "wait inside next(loader); group = loader, seq = batch, peer = worker or -1, corr = iterator"),
    "input.iter": Span(21, "DATA", ("group", "corr", "peer"),
                       "iter(loader), worker start included; corr = iterator, peer = number of workers"),
    "input.load": Span(22, "DATA", ("group", "seq", "peer", "bytes"),
                       "fetch and collate of one batch; peer = worker or -1, seq = n-th batch of that worker"),
    "input.fetch": Span(23, "DATA", ("group", "seq", "peer"), "child of input.load: blocked (storage, network, sleep)"),
    "input.cpu_wait": Span(24, "DATA", ("group", "seq", "peer"), "child of input.load: runnable but without a core"),
    "input.prep": Span(25, "DATA", ("group", "seq", "peer"), "child of input.load: CPU time inside the dataset"),
    "input.collate": Span(26, "DATA", ("group", "seq", "peer"), "child of input.load: CPU time inside collate"),
    "input.transfer": Span(27, "DATA", ("bytes", "corr"),
                           "copy from host to device; corr = 1 if the host waits until the device has done all before "
                           "and the copy (also -1 in older runs)"),
    "input.parts": Span(28, "DATA", (),
                        "raw only, follows the input.load it measures: a = thread CPU ns, b = run delay ns (-1 when "
                        "unknown), c = CPU ns of collate inside a, d = ns of GC inside a"),
    "input.worker": Span(29, "DATA", ("group", "corr", "peer", "seq"),
                         "instant at iter(loader), one per worker process: corr = iterator, peer = worker, seq = pid"),
    "input.made": Span(30, "DATA", ("peer", "seq", "", "bytes"),
                       "raw only, becomes an input.load: a batch made by threads or a data server, written before the "
                       "input.next that took it; a = how many make batches, b = n-th batch of the pass, c = items"),
    "input.audit": Span(31, "MARK", ("peer", "seq", "corr", "bytes"),
                        "instant: peer = a pass of headway's DataLoader, numbered by its process. At its start seq = "
                        "-1 - index in ranks[r].deliveries, corr = epoch, bytes = where in it; later, and at the end, "
                        "seq = examples taken, corr and bytes = the words of their audit sum"),
    # Communication on the training thread. group = process group, seq = n-th in that group.
    "comm.wait": Span(40, "COLL", ("group", "seq", "bytes"), "end of backward until DDP's gradients are reduced"),
    "comm.collective": Span(41, "COLL", ("group", "seq", "bytes", "corr"),
                            "blocking collective; corr = index of its name"),
    "comm.send": Span(42, "SEND", ("group", "seq", "bytes", "peer"), "blocking send"),
    "comm.recv": Span(43, "RECV", ("group", "seq", "bytes", "peer"), "blocking receive"),
    "comm.post": Span(45, "MARK", ("group", "seq", "corr", "peer"),
                      "instant: an asynchronous send (corr = 0) or receive (corr = 1) is posted; its wait is recorded "
                      "as comm.send or comm.recv"),
    "comm.init": Span(44, "COLL", ("group",), "process group creation"),
    # State.
    "checkpoint.save": Span(60, "CKPT", ("bytes", "seq", "corr"),
                            "torch.save or a DCP save; corr = 1 for DCP, 0 for a single file"),
    "checkpoint.sync": Span(61, "CKPT", ("bytes",), "fsync, and the flush and close around it"),
    "checkpoint.rename": Span(62, "CKPT", (), "rename or replace: the commit"),
    "checkpoint.load": Span(63, "CKPT", ("bytes",), "torch.load or a DCP load"),
    # Headway's own saves. seq = number of the checkpoint (step-<n>). The first three hold the training thread up.
    "checkpoint.snapshot": Span(64, "CKPT", ("bytes", "seq"), "the state is copied while training stands still"),
    "checkpoint.wait": Span(65, "CKPT", ("bytes", "seq"),
                            "wait for the end of a copy before the update, or for an earlier save before a new one"),
    "checkpoint.restore": Span(66, "CKPT", ("bytes", "seq", "corr", "peer"),
                               "a saved state is read back; bytes = read, corr = bytes that were checked, peer = 1 if "
                               "all of it came from an agent's memory, 0 from storage"),
    # In the background, on lane 'saver': written down when the saver reports; they never own the device.
    "checkpoint.persist": Span(67, "CKPT", ("bytes", "seq"), "the copy is written to storage"),
    "checkpoint.digest": Span(68, "CKPT", ("bytes", "seq"), "checksums of what was written"),
    "checkpoint.commit": Span(69, "CKPT", ("bytes", "seq"), "from the last rank's file until the checkpoint is valid"),
    "checkpoint.parity": Span(70, "CKPT", ("bytes", "seq"), "redundancy across ranks; bytes = of parity"),
    "checkpoint.scrub": Span(71, "CKPT", ("bytes", "seq"), "stored bytes are checked against their checksums"),
    "checkpoint.repair": Span(72, "CKPT", ("bytes", "seq"), "damaged bytes are rebuilt; bytes = rebuilt"),
    # The host.
    "host.gc": Span(80, "HOST", ("corr", "seq"),
                    f"garbage collection; corr = generation, {GC_CALLED} more where the script called gc.collect, "
                    "seq = objects collected"),
    "host.logging": Span(81, "HOST", ("corr",), "handlers of the logging module; corr = level"),
    "host.compile": Span(82, "HOST", ("corr",), "torch.compile at work; corr = 1 where its cache held all it needed"),
    "host.import": Span(83, "HOST", (), "import of torch"),
    "host.cpu": Span(84, "MARK", ("corr", "seq", "bytes", "peer"),
                      "instant, now and then at a step: corr = CPU ns of the training thread so far, seq = ns that it "
                      "was ready to run but had no core, itself or its pool of threads (-1 when unknown), bytes = CPU "
                      "ns of all threads of the rank, peer = ms by which seq may be more, where both waited in turns"),
    "host.spins": Span(88, "MARK", ("corr",),
                       "instant, with a host.cpu, once samples of the thread's code tell: corr = CPU ns so far in "
                       "which the training thread did not compute, but spun until others of its pool were ready, or "
                       "worked for headway beside steps"),
    "host.script": Span(85, "HOST", ("corr",),
                        "derived when the run is finalised: from the end of a step to the first forward of the next "
                        "one, evaluation left out; what has a name inside keeps its own time; corr = -1"),
    "host.recording": Span(86, "HOST", ("corr",),
                           "headway's own work on the training thread behind a step (deep windows opened and closed, "
                           "forks that read data again, what a remedy does there), where it took 0.2 ms or more; "
                           "corr = 1 of a fork that reads data again, also inside an input.next: to see whether that "
                           "gives the same, or to compare a remedy's batch with the script's own"),
    "host.sync": Span(87, "HOST", (),
                      "the host waits for a device (cpu, synchronize), where it took "
                      "0.02 ms or more"),
    # What a script, or a callback of its trainer, says of itself.
    "eval.mark": Span(90, "MARK", ("corr",), "the script (or a callback) marks evaluation; corr = n-th of its mark"),
    "epoch": Span(91, "MARK", ("corr",), "instant: the script (or a callback) begins an epoch; corr = its index"),
    "pause": Span(93, "MARK", (),
                  "between two cells of a notebook; when the run is finalised, what the training thread recorded "
                  "meanwhile (a widget, a task in the background) is cut out of it"),
}  # fmt: skip
"""Every name the recorder writes -> its code, kind and columns."""

IN_BACKGROUND: tuple[str, ...] = (
    "checkpoint.persist", "checkpoint.digest", "checkpoint.commit", "checkpoint.parity", "checkpoint.scrub",
    "checkpoint.repair",
)  # fmt: skip
"""Names of what another process did for the rank: the training thread only writes it down, later."""

COLLECTIVES: tuple[str, ...] = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "wait",
    "all_gather_single", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced",
)  # fmt: skip
"""Names of collectives by index: `corr` of `comm.collective`. 'wait' = a Work whose collective is not known."""

SPAN_OF_CODE: dict[int, str] = {span.code: name for name, span in SPANS.items()}
"""Code -> name."""

assert len(SPAN_OF_CODE) == len(SPANS), "two spans share a code"
