"""The command: one literal table of verbs, each loaded when it is called.

`headway --help` imports neither torch nor any room. Everything behind the
first `--` belongs to the script that is run, and reaches it unchanged.

Exit codes: 0 success, 1 internal error, 2 usage error, 3 check failed (damage, a bar
missed); `run` exits with the first failing rank's code (128 + signal), after Ctrl-C by that signal.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.core.errors import HeadwayError, InputError
from headway.core.tables import pick

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

VERBS: dict[str, tuple[str, str]] = {
    "run": ("headway.verbs.runs.run:run", "Run a training script unmodified, record it, show where its time went."),
    "why": ("headway.verbs.runs.why:why", "Explain a run or a trace: ledger, ranked causes, next best action."),
    "whatif": ("headway.verbs.runs.plan:whatif", "Predict the step time after edits, by replaying the run."),
    "plan": ("headway.verbs.runs.plan:plan", "Rank the remedies, compose the best set, write a plan file."),
    "compare": ("headway.verbs.runs.compare:compare", "Compare two runs; exit 3 when the second is slower."),
    "hang": ("headway.verbs.jobs.fault:hang", "Find the ranks that block a job which makes no progress."),
    "report": ("headway.verbs.runs.report:report", "Write one self-contained HTML page of a run."),
    "watch": ("headway.verbs.runs.watch:watch", "Serve the page of a run live, while it goes on."),
    "mcp": ("headway.verbs.runs.watch:mcp", "Serve recorded runs to coding assistants (MCP)."),
    "doctor": ("headway.verbs.demo:doctor", "Check this host before a run: memory, limits, threads, versions."),
    "demo": ("headway.verbs.demo:demo", "Show the whole loop on a small real job, in about two minutes."),
    "try": (
        "headway.verbs.runs.try_edits:try_edits",
        "Try what a few lines would win in a script, side by side on the same batches.",
    ),
    "tune": ("headway.verbs.models.tune:tune", "Tune a script's settings while it trains, by branches of its state."),
    "bench": ("headway.verbs.demo:bench", "Run a benchmark by name; each holds headway to a stated bar."),
    "drill": ("headway.verbs.jobs.drill:drill", "Play real faults on a job, and score which of them were noticed."),
    "trace import": ("headway.verbs.runs.trace:import_", "Convert any known trace format into headway's own."),
    "trace export": ("headway.verbs.runs.trace:export", "Write a window of a trace for Perfetto or chrome://tracing."),
    "trace info": ("headway.verbs.runs.trace:info", "Describe what a trace file or a run holds."),
    "trace align": ("headway.verbs.runs.trace:align", "Put the clocks of all ranks on one: offset, drift, causality."),
    "cluster batch": ("headway.verbs.jobs.cluster_prices:batch", "Find the batch size that learns most per second."),
    "cluster cancel": ("headway.verbs.jobs.cluster_service:cancel", "End a job of a service, waiting or running."),
    "cluster compare": (
        "headway.verbs.jobs.cluster:compare",
        "Report waiting in a recorded queue, and compare policies on it.",
    ),
    "cluster explain": ("headway.verbs.jobs.cluster_service:explain", "Explain why a job of a service runs or waits."),
    "cluster fork": (
        "headway.verbs.jobs.cluster_fork:fork",
        "Train with a copy of a script on each of several unlike devices.",
    ),
    "cluster prices": (
        "headway.verbs.jobs.cluster_prices:prices",
        "Price the rest of a job on each offer of instances, by recorded prices.",
    ),
    "cluster queue": ("headway.verbs.jobs.cluster_service:queue", "Show the jobs of a service, and where they run."),
    "cluster serve": ("headway.verbs.jobs.cluster_service:serve", "Share devices among submitted training scripts."),
    "cluster sim": ("headway.verbs.jobs.cluster:sim", "Simulate a queue of jobs under one scheduling policy."),
    "cluster submit": ("headway.verbs.jobs.cluster_service:submit", "Hand a training script to a service."),
    "cluster watch": ("headway.verbs.jobs.cluster_service:watch", "Serve the jobs of a service as a live page."),
    "comm bench": ("headway.verbs.models.comm:bench", "Measure what codecs of gradients cost on this host."),
    "comm options": ("headway.verbs.models.comm:options", "List every way to compress and send a gradient."),
    "comm overlap": ("headway.verbs.models.comm:overlap", "Time matmuls beside their collective, and choose a form."),
    "comm plan": (
        "headway.verbs.models.comm:plan",
        "Search the gradient buckets under which a run's step is shortest.",
    ),
    "comm strategy": ("headway.verbs.models.comm:strategy", "Search how to compress each gradient (simulated)."),
    "cost calibrate": (
        "headway.verbs.models.cost:calibrate",
        "Measure this host's operators; an interrupted one goes on.",
    ),
    "cost predict": (
        "headway.verbs.models.cost:predict",
        "Predict the step of a model that was never run on this host.",
    ),
    "cost transfer": (
        "headway.verbs.models.cost:transfer",
        "Predict a new device from a few measurements and other devices.",
    ),
    "ckpt advise": (
        "headway.verbs.stored.ckpt_advise:advise",
        "Compute how often to save, and what a failure loses each way.",
    ),
    "ckpt bench": ("headway.verbs.stored.ckpt_advise:bench", "Measure what a save costs on this host and folder."),
    "ckpt diff": ("headway.verbs.stored.ckpt:diff", "Compare two checkpoints bit by bit."),
    "ckpt export": ("headway.verbs.stored.ckpt_convert:export", "Write a checkpoint as safetensors or torch.save."),
    "ckpt import": (
        "headway.verbs.stored.ckpt_convert:import_",
        "Make a checkpoint of safetensors or torch.save files.",
    ),
    "ckpt ls": ("headway.verbs.stored.ckpt:ls", "List the checkpoints of a run: step, age, size, redundancy."),
    "ckpt prune": (
        "headway.verbs.stored.ckpt:prune",
        "Remove old checkpoints by a rule; a dry run without --yes.",
    ),
    "ckpt repair": ("headway.verbs.stored.ckpt_convert:repair", "Rebuild what is damaged from parity and copies."),
    "ckpt reshard": (
        "headway.verbs.stored.ckpt_convert:reshard",
        "Rewrite a checkpoint into the files of N ranks.",
    ),
    "ckpt scrub": ("headway.verbs.stored.ckpt:scrub_", "Verify all checkpoints of a run, at a bounded rate."),
    "ckpt show": ("headway.verbs.stored.ckpt:show", "Show the tensors and other values of a checkpoint."),
    "ckpt verify": (
        "headway.verbs.stored.ckpt:verify_",
        "Check that a checkpoint is intact; name the damaged tensors.",
    ),
    "data audit": ("headway.verbs.loading.data:audit", "Prove that each example was delivered once per epoch."),
    "data bench": (
        "headway.verbs.loading.data_bench:bench",
        "Measure what loading and moving batches costs on this machine.",
    ),
    "data cluster": (
        "headway.verbs.loading.data:cluster",
        "Write a table with the rows of each session side by side.",
    ),
    "data plan": ("headway.verbs.loading.data_plan:plan", "Choose an input pipeline's order, cache, workers, offload."),
    "data profile": (
        "headway.verbs.loading.data_plan:profile",
        "Measure what each operator of an input pipeline costs.",
    ),
    "data serve": (
        "headway.verbs.loading.data_serve:serve",
        "Fetch and prepare a dataset once, for all jobs of this host.",
    ),
    "data stalls": (
        "headway.verbs.loading.data:stalls",
        "Split a run's input stalls into fetch, prep and transfer; what-if.",
    ),
    "data status": ("headway.verbs.loading.data_serve:status", "Show the status of data servers: jobs, hits, bytes."),
    "data verify-resume": (
        "headway.verbs.loading.measure:verify_resume",
        "Prove that a script's loaders go on exactly.",
    ),
    "fault incidents": (
        "headway.verbs.jobs.fault:incidents",
        "List a run's failures: who, what was done, what it cost.",
    ),
    "fault plan": (
        "headway.verbs.jobs.fault:plan",
        "Compute how often to save, and how many hosts to keep in reserve.",
    ),
    "fault probe": (
        "headway.verbs.jobs.fault:probe",
        "Train a tiny model on each rank: do all get the same bits?",
    ),
    "fault sim": (
        "headway.verbs.jobs.fault:sim",
        "Simulate a job on a fleet whose hosts fail: ETTR, and where the rest went.",
    ),
    "storage backends": (
        "headway.verbs.stored.ckpt_convert:backends",
        "Test which ways to find written pages work here.",
    ),
    "storage fit": (
        "headway.verbs.stored.storage:fit",
        "Learn failure rates from disk logs; name each model's scheme.",
    ),
    "storage fleet": (
        "headway.verbs.stored.storage:fleet",
        "Simulate redundancy that follows the failure rates of disks.",
    ),
    "storage region": (
        "headway.verbs.stored.ckpt_convert:region",
        "Scrub the file of a protected region; repair it.",
    ),
    "storage restripe": (
        "headway.verbs.stored.ckpt_convert:restripe",
        "Change the parity scheme of what is stored.",
    ),
    "model grow": ("headway.verbs.models.model_grow:grow", "Start a larger model at a trained smaller one's outputs."),
    "model precision": (
        "headway.verbs.models.tune:precision",
        "Choose operators of slow ranks that compute in fewer bits.",
    ),
    "model serve": (
        "headway.verbs.models.model_serve:serve",
        "Plan which device serves which layers, in how many bits.",
    ),
    "parallel schedule show": (
        "headway.verbs.models.parallel_schedule:show",
        "Show a pipeline's order on a time axis.",
    ),
    "parallel schedule check": (
        "headway.verbs.models.parallel_schedule:check",
        "Check a pipeline's order from a file.",
    ),
    "parallel schedule export": (
        "headway.verbs.models.parallel_schedule:export",
        "Write an order as torch's CSV or JSON.",
    ),
    "parallel bubbles": (
        "headway.verbs.models.parallel_bubbles:bubbles",
        "Show what a recorded pipeline's stages wait.",
    ),
    "parallel fill": (
        "headway.verbs.models.parallel_bubbles:fill",
        "Run other jobs in the gaps of a pipeline.",
    ),
    "parallel ntp": (
        "headway.verbs.models.parallel_plan:ntp",
        "Train on with tensor-parallel groups that lost devices.",
    ),
    "parallel plan": (
        "headway.verbs.models.parallel_plan:plan",
        "Split a model over devices, from a profile of its layers.",
    ),
    "parallel replan": (
        "headway.verbs.models.parallel_schedule:replan",
        "Plan the steps of pipelines that lost workers.",
    ),
    "parallel simulate": (
        "headway.verbs.models.parallel_schedule:simulate",
        "Simulate a pipeline: time, idle, memory.",
    ),
    "power check": ("headway.verbs.jobs.power:check", "Hold the power of a site against what its utility allows."),
    "power export": ("headway.verbs.jobs.power:export", "Print what an operator sets on the devices of a power plan."),
    "power plan": (
        "headway.verbs.jobs.power:plan",
        "Find the cheapest floor, ramps, filler, battery that a spec needs.",
    ),
    "storage sim": (
        "headway.verbs.stored.storage:sim",
        "Simulate what intact non-volatile memory costs, by design.",
    ),
    "storage table": (
        "headway.verbs.stored.storage:table",
        "List schemes of redundancy: tolerated failure rate, space.",
    ),
}
"""Verb -> ("module:function", one line for `--help`)."""

GROUPS: dict[str, str] = {
    "cluster": "Queues of jobs: policies, simulated, and a service that shares devices by them.",
    "comm": "Communication between ranks.",
    "fault": "Failures: incidents, what restarts cost, plans against them.",
    "cost": "Costs learned from measurements.",
    "trace": "Read, convert and describe traces.",
    "data": "The input side of a run.",
    "ckpt": "Checkpoints: list, verify, repair, convert.",
    "storage": "Redundancy of what is stored.",
    "power": "Power of a site over time: limits, and what keeps to them.",
    "model": "The model itself.",
    "parallel": "Pipelines and partitions of a model.",
    "parallel schedule": "Orders of a pipeline's step.",
    "lab": "Simulations and models for research: queues, fleets, codecs, redundancy.",
}
"""What comes before a verb's last word -> its line in `--help`; longer ones after what they begin with."""

LAB: tuple[str, ...] = (
    "cluster sim", "comm options", "comm strategy", "cost transfer", "data cluster", "fault sim", "parallel simulate",
    "storage fleet", "storage sim",
)  # fmt: skip
"""Verbs for research, under a heading of their own in their group's help: `headway lab cluster-sim` is `headway cluster
sim`."""

SIMULATING: tuple[str, ...] = ("cluster compare", "cluster prices", "fault plan", "power check", "power plan")
"""Verbs beside those of `LAB` that simulate."""

BLAS_THREADS: tuple[str, ...] = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What caps a BLAS library, set to 1 where the user has not set it: matrices of a simulation are so small that waiting
threads take many times the processor time of the work."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("run", "why", "plan", "report", "try", "tune", "demo", "doctor"),
    "Analyse": ("compare", "hang", "watch", "whatif", "trace"),
    "Data and checkpoints": ("data", "ckpt", "storage"),
    "Plan jobs and clusters": ("comm", "parallel", "model", "fault", "drill", "cluster", "power", "cost"),
    "Develop and research": ("bench", "lab"),
}
"""Section of `headway --help` -> the words of commands in it."""

ROOM, RIGHT = (
    "Free some of it, or name another place.",
    "Check its permissions, or name another place: --out, or -o, or another folder to run in.",
)
PLACES: dict[int, str] = {
    errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: RIGHT, errno.EACCES: RIGHT, errno.EPERM: RIGHT,
    errno.ENAMETOOLONG: "Write a shorter name.",
}  # fmt: skip
"""Error of the place that was written to or read from -> what to do about it."""

LONGEST_QUOTE = 255
"""Most letters of that place that the message quotes whole: no file's name is longer."""


def build(explained: str = "") -> App:
    """Make the parser from `VERBS`; no verb's module is imported.

    The verb `explained` is left without its line, so that its own docstring becomes its page of help.
    """
    from cyclopts import App, Group, Parameter

    from headway import __version__

    sections = [(Group(title, sort_key=place), words) for place, (title, words) in enumerate(SECTIONS.items())]
    section_of = {word: section for section, words in sections for word in words}
    simulations = Group("Simulations and research", sort_key=1)

    app = App(
        name="headway",
        help="Find where a training job's accelerator time goes, and win it back.",
        help_epilogue="Start with: headway run -- train.py     then: headway why, headway plan, headway run --apply",
        help_format="plaintext",
        default_parameter=Parameter(negative=()),
        version=__version__,
        version_flags=["--version"],
    )
    groups = {
        name: App(
            name=name.split()[-1], help=text, help_format="plaintext", help_epilogue="", group=section_of.get(name)
        )
        for name, text in GROUPS.items()
    }
    app["--help"].group = app["--version"].group = Group("Options", sort_key=len(sections))
    for name, group in groups.items():
        groups.get(name.rpartition(" ")[0], app).command(group)
    for verb, (target, text) in VERBS.items():
        group_name, _, name = verb.rpartition(" ")
        page: dict[str, Any] = {} if verb == explained else {"help": text}
        page |= {"group": section_of[verb]} if verb in section_of else {}
        if verb in LAB:
            groups["lab"].command(target, name=verb.replace(" ", "-"), help_epilogue="", **page)
            page["group"] = simulations
        groups.get(group_name, app).command(target, name=name, help_epilogue="", **page)
    return app


def spelt_out(ours: list[str]) -> list[str]:
    """Return the arguments with the verb that `lab` stands before.

    >>> spelt_out(["lab", "cluster-sim", "--json"]), spelt_out(["lab", "--help"])
    (['cluster', 'sim', '--json'], ['lab', '--help'])
    """
    verb = next((verb for verb in LAB if ours[:2] == ["lab", verb.replace(" ", "-")]), None)
    return ours if verb is None else [*verb.split(), *ours[2:]]


def split_script(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split at the first `--`: what is ours, and the script with its arguments (None without a `--`).

    >>> split_script(["run", "--json", "--", "train.py", "--", "--help", ""])
    (['run', '--json'], ['train.py', '--', '--help', ''])
    """
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, None
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, dispatch, and exit with the verb's code."""
    reserve_standard_files()
    ours, script = split_script(sys.argv[1:] if arguments is None else arguments)
    is_process = arguments is None  # what is imported then lasts as long as the process does
    if is_process:
        gc.disable()
    code, is_interrupted = 0, False
    try:
        code = dispatch(ours, script)
        print(end="", flush=True)  # a standard output that was closed before the start is None, and has no flush
    except HeadwayError as error:
        complain(str(error))
        code = error.exit_code
    except SystemExit as leaving:  # how rich ends a page of help whose reader went away
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        code = 0
    except BrokenPipeError:  # the reader of our output went away: not an error, and nothing is left to say
        pass
    except OSError as fault:
        if fault.errno not in PLACES:
            raise
        where = "" if fault.filename is None else f": {fault.filename}"
        where = where if len(where) <= LONGEST_QUOTE else f"{where[:40]}...{where[-40:]}"
        complain(f"{fault.strerror}{where}. {PLACES[fault.errno]}")
        code = code or 2  # of a job that failed, its own stands
    except KeyboardInterrupt:
        code, is_interrupted = 130, True
    leave_stdout()
    if is_process:
        gc.freeze()  # Python's last collections would look at all there is, to give back what ends with the process
    # While Python ends, Ctrl-C has its default effect: a second one would put a signal's code in place of ours.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if is_process and is_interrupted:
        from headway.core.machine.interruptions import end_by_ctrl_c

        end_by_ctrl_c()
    sys.exit(code)


def reserve_standard_files() -> None:
    """Put nothing in the place of a standard file that was closed: the next file opened would get its number.

    What a rank prints would go there, into a pipe or a file of ours.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one


def leave_stdout() -> None:
    """Discard what cannot be written to stdout: Python would try again, and end with a code of its own."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def keep_imported() -> None:
    """Collect garbage from now on, but not in what was imported: looking through that again and again costs 0.1 s."""
    gc.freeze()
    gc.enable()


def complain(text: str) -> None:
    """Write one line of our own on stderr; a name in it does not steer the terminal."""
    from headway.core.errors import say_beside
    from headway.report.paper import STEERING

    say_beside(f"headway: {text.translate(STEERING)}\n")


def dispatch(ours: list[str], script: list[str] | None) -> int:
    """Run the verb that `ours` names; a verb that takes a script gets `script`."""
    from cyclopts import CycloptsError

    words = {word.split()[0]: word for word in (*VERBS, *GROUPS)}
    ours = spelt_out(ours)
    if ours and not ours[0].startswith("-"):
        pick(words, ours[0], "verb")
    verb = next((verb for verb in VERBS if ours[: len(verb.split())] == verb.split()), "")
    if verb in LAB or verb in SIMULATING:
        for name in BLAS_THREADS:
            os.environ.setdefault(name, "1")
    app = build(verb)
    try:
        command, bound, ignored = app.parse_args(ours, print_error=False, exit_on_error=False, help_on_error=False)
    except CycloptsError as error:
        raise InputError(misuse(ours, error)) from None
    if not gc.isenabled():
        keep_imported()
    if "script" in ignored:
        return int(command(*bound.args, **bound.kwargs, script=script) or 0)
    if script is not None:
        raise InputError(
            "only `headway run`, `try`, `tune`, `cluster fork`, `cluster submit`, `data stalls`, `data verify-resume` "
            "and `model precision` take a script behind `--`. Drop the `--` and what follows it."
        )
    from headway.verbs.shared.output import at_work

    with at_work(verb):
        return int(command(*bound.args, **bound.kwargs) or 0)


def misuse(ours: Sequence[str], error: CycloptsError) -> str:
    """Say in one line what is wrong with the arguments `ours`, and what would be right."""
    from cyclopts.exceptions import UnusedCliTokensError

    verb = next((verb for verb in VERBS if list(ours[: len(verb.split())]) == verb.split()), "")
    see = f"headway {verb}".strip()
    unused = list(error.unused_tokens or ()) if isinstance(error, UnusedCliTokensError) else []
    if verb == "run" and (scripts := unused[:1] or [word for word in ours if word.endswith(".py")]):
        cut = ours.index(scripts[0])
        right = f"headway {shlex.join(ours[:cut])} -- {shlex.join(ours[cut:])}"
        return f"put the script and its arguments after `--`. Write: {right}"
    if unused:
        words = f"argument{'' if len(unused) == 1 else 's'} {' '.join(map(repr, unused))}"
        return f"`{see}` does not take the {words}. Drop {'it' if len(unused) == 1 else 'them'}; see: {see} --help"
    text = " ".join(str(error).split()).removeprefix(f'Command "{verb}" ')
    prefix, _, message = text.partition(": ")  # a converter's message may begin with the option already
    text = message if message.startswith(f"{prefix.removeprefix('Invalid value for ')} ") else text
    name, missing, _ = text.removeprefix("parameter ").removeprefix("Parameter ").partition(" requires an argument")
    text = (f"{name} needs a value" if name in ours else f"argument {name} is missing") if missing else text
    below = next(iter(ours[ours.index(name) + 1 :]), "") if name in ours else ""
    if missing and below[:1] == "-" and below[1:2].isdigit():
        text = f"{name} is {below!r}; it must not be negative"
    if verb == "run" and "unknown option" in text.lower() and "Did you mean" not in text:
        return f"{text[:1].lower()}{text[1:].rstrip(' .')}. Put the script's own options behind it: {see} -- SCRIPT ..."
    return f"{text[:1].lower()}{text[1:].rstrip(' .,?')}{'?' if text.endswith('?') else '.'} See: {see} --help"


if __name__ == "__main__":
    main()
