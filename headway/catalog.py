"""What the project offers, as literal tables: adding a remedy is adding a line.

Nothing is imported here: an entry is "module:function", resolved where it is
used. Advisers run in the command, remedies run inside ranks.

>>> sorted(REMEDIES)
['checkpoint.async', 'cluster.batch', 'cluster.noise', 'comm.bucket', 'comm.compress', 'comm.gradient_view', \
'comm.order', 'comm.static_graph', 'data.cache', 'data.server', 'data.threads', 'data.workers', 'fault.guard', \
'host.gc', 'host.logging', 'model.tune', 'parallel.schedule', 'power.filler']
"""

from __future__ import annotations

ADVISERS: dict[str, str] = {
    "data": "headway.data.advise:propose",
    "comm": "headway.comm.advise:propose",
    "parallel": "headway.parallel.advise:propose",
    "checkpoint": "headway.checkpoint.advise:propose",
    "host": "headway.host.advise:propose",
    "fault": "headway.fault.advise:propose",
    "power": "headway.power.advise:propose",
    "cluster": "headway.cluster.advise:propose",
    "model": "headway.model.advise:propose",
}
"""Room -> the function that proposes its remedies from (ledger, program, setup)."""

REMEDIES: dict[str, str] = {
    "data.workers": "headway.data.runtime.remedies.workers:workers",
    "data.threads": "headway.data.runtime.remedies.switch:threads",
    "data.cache": "headway.data.runtime.caching.cache:cache",
    "data.server": "headway.data.runtime.remedies.sharing:server",
    "comm.bucket": "headway.comm.runtime.ddp:bucket",
    "comm.gradient_view": "headway.comm.runtime.ddp:gradient_view",
    "comm.static_graph": "headway.comm.runtime.ddp:static_graph",
    "comm.order": "headway.comm.runtime.fsdp:order",
    "comm.compress": "headway.comm.runtime.compress:compression",
    "parallel.schedule": "headway.parallel.runtime.schedule:schedule",
    "checkpoint.async": "headway.checkpoint.runtime.torch_calls.switch:behind",
    "fault.guard": "headway.fault.runtime.loss_guard:guard",
    "host.gc": "headway.host.runtime:collect_together",
    "host.logging": "headway.host.runtime:log_on_a_thread",
    "power.filler": "headway.power.runtime.filler:fill_gaps",
    "cluster.batch": "headway.cluster.runtime.batch:batch",
    "cluster.noise": "headway.cluster.runtime.noise:noise",
    "model.tune": "headway.model.runtime.tuned_script:tune",
}
"""Remedy -> the function that applies it inside a rank. What is proposed and not listed here is only predicted."""

REHEARSALS: dict[str, str] = {"rehearsal.loader": "headway.data.runtime.remedies.rehearsal:rehearse"}
"""What is asked while a run is recorded -> the function that says which remedies a loader would not take."""

SUPERVISOR = "headway.fault.runtime.supervise:supervisor"
"""What supervises the attempts of a run that may have several."""

PARAMETERS: dict[str, dict[str, str]] = {
    "data.workers": {
        "num_workers": "count", "prefetch_factor": "size", "persistent_workers": "flag", "pin_memory": "flag",
        "max_workers": "count",
    },
    "data.threads": {"num_workers": "count", "prefetch_factor": "size", "blocked_datasets": "names"},
    "data.cache": {"bytes": "size"},
    "data.server": {"cache_bytes": "size", "idle_s": "number"},
    "comm.bucket": {"bucket_mb": "number", "bucket_mb_list": "numbers", "respect_explicit": "flag"},
    "comm.gradient_view": {},
    "comm.static_graph": {},
    "comm.order": {"ahead": "size"},
    "comm.compress": {"codec": "codec", "feedback": "flag", "two_way": "flag", "min_bytes": "count"},
    "parallel.schedule": {"order": "names"},
    "checkpoint.async": {"every_steps": "size"},
    "fault.guard": {"action": "name"},
    "host.gc": {"every_steps": "size", "rss_growth_bytes": "size"},
    "host.logging": {"queue": "size"},
    "cluster.batch": {
        "batch_size": "size", "own_batch_size": "size", "accumulation": "count", "initial_batch": "size",
        "noise_scale": "number", "predicted_useful": "number",
    },
    "cluster.noise": {"every_steps": "size"},
    "model.tune": {"settings": "names", "trials": "size", "seed": "count"},
    "power.filler": {"on_after_s": "number", "off_within_s": "number", "level": "number"},
}  # fmt: skip
"""Remedy -> its parameters and their kinds (`headway.plan.parameters.KINDS`): a plan file is checked before a run."""

MEASUREMENTS: dict[str, str] = {
    "measure.cold": "headway.data.runtime.checks.measurements:cold",
    "measure.warm": "headway.data.runtime.checks.measurements:warm",
    "measure.synthetic": "headway.data.runtime.checks.measurements:synthetic",
}
"""Measurement -> the function that sets it up inside a rank: phases of `headway data stalls -- SCRIPT`, in order."""

DRILL: dict[str, str] = {"fault.inject": "headway.fault.runtime.injectors:inject"}
"""What a drill does inside a rank -> the function that does it; no plan of a user's names it."""

CHECKS: dict[str, str] = {"check.resume": "headway.data.runtime.checks.resume_check:resume"}
"""Check -> the function that makes it inside a rank, for `headway data verify-resume`."""

CAUSES_OF_REMEDY: dict[str, tuple[str, ...]] = {
    "data.workers": ("input.fetch", "input.prep"),
    "data.threads": ("input.fetch", "input.prep", "input.transfer"),
    "data.cache": ("input.fetch", "input.prep"),
    "data.server": ("input.fetch", "input.prep"),
    "comm.bucket": ("comm.exposed",),
    "comm.gradient_view": ("comm.exposed",),
    "comm.static_graph": ("comm.exposed",),
    "comm.order": ("comm.exposed",),
    "comm.compress": ("comm.exposed",),
    "comm.links": ("comm.exposed",),
    "parallel.schedule": ("bubble.p2p",),
    "host.gc": ("host.gc",),
    "host.logging": ("host.logging",),
    "checkpoint.interval": ("checkpoint.stall",),
    "checkpoint.async": ("checkpoint.stall",),
    "straggler.remove": ("straggler.rank",),
    "fault.guard": (),
    "power.filler": (),
    "cluster.batch": (),
    "cluster.noise": (),
    "model.tune": (),
}
"""Remedy -> the causes that it acts against."""
