"""Starts headway's recording in every Python process of a job, then runs the user's own sitecustomize.

This folder stands first on PYTHONPATH for ranks that `headway run` starts, so
forked, spawned and fork-served children are covered too. Without HEADWAY_RUN
in the environment, or with HEADWAY=off, it does nothing but chain. Until the
script imports torch only one finder is installed (about 1 ms), and three
functions of `os` know that a rank leads a session already: nothing else of
headway, and nothing of the standard library that is not there anyway.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import module_from_spec, spec_from_loader
from _frozen_importlib_external import PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_RUNTIME = os.path.dirname(_HERE)


def _record() -> None:
    """Wait for the import of torch; a failure is one line on stderr and never stops the job."""
    if not os.environ.get("HEADWAY_RUN") or os.environ.get("HEADWAY", "").lower() in ("off", "0"):
        return
    if os.environ.setdefault("HEADWAY_MAIN_PID", str(os.getpid())) == str(os.getpid()):
        _lead()
    # By path: `import headway` would load logging and more before the script's first line.
    loader = SourceFileLoader("headway_hooks", os.path.join(_RUNTIME, "in_rank", "hooks.py"))
    spec = spec_from_loader("headway_hooks", loader)
    try:
        if spec is not None:
            hooks = module_from_spec(spec)
            loader.exec_module(hooks)
            finder = hooks.PostImport.first("torch", _begin)
            finder.install()
            if os.environ.get("HEADWAY_WARM_NOTE"):
                finder.started = _surroundings()
    except Exception as cause:
        _warn(cause)


def _surroundings() -> Any:
    """Return what `headway.runtime.host.warm_note.surroundings` says at the start of the process."""
    loader = SourceFileLoader("headway_warm_note", os.path.join(_RUNTIME, "host", "warm_note.py"))
    spec = spec_from_loader("headway_warm_note", loader)
    if spec is None:
        return None
    note = module_from_spec(spec)
    loader.exec_module(note)
    return note.surroundings()


def _lead() -> None:
    """Grant a rank a session or process group of its own: it leads one already, so that the kernel would refuse it."""
    for name in ("setpgrp", "setpgid", "setsid"):
        setattr(os, name, _granted(getattr(os, name)))


def _keep_board() -> None:
    """Keep the launcher's board (`headway.runtime.launching.save_and_leave`) from programs that the rank starts."""
    descriptor = os.environ.get("HEADWAY_LEAVE", "").partition(":")[0]
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:headway-leave "):
            os.set_inheritable(int(descriptor), False)
    except (OSError, ValueError):  # not started by a launcher, or a process that it was closed in
        return


def _granted(original: Any) -> Any:
    def lead(*arguments: int) -> None:
        try:
            original(*arguments)
        except PermissionError:
            if os.getsid(0) != os.getpid() or not {*arguments} <= {0, os.getpid()}:
                raise

    lead.__name__, lead.__doc__ = original.__name__, original.__doc__
    return lead


def _begin(finder: Any) -> None:
    """Hand the finder over to the bootstrap: the script is importing torch."""
    root = os.path.dirname(os.path.dirname(_RUNTIME))  # the library that launched the job records it, installed or not
    sys.path.insert(0, root)
    try:
        from headway.runtime.in_rank import bootstrap

        bootstrap.start(finder)
        bootstrap.before_import("torch")
    except Exception as cause:
        finder.remove()
        _warn(cause)
    finally:
        sys.path.remove(root)


def _warn(cause: Exception) -> None:
    try:
        sys.stderr.write(f"headway: nothing is recorded in process {os.getpid()}: {cause!r}\n")
    except (OSError, ValueError, AttributeError):  # no stderr
        return


def _chain() -> None:
    """Run the sitecustomize that would have been found without this one, and leave it in `sys.modules`."""
    here = os.path.realpath(_HERE)
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.realpath(entry) != here])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _serve() -> None:
    """Be the process that later attempts are forked from: what returns from here is a rank, forked, about to begin."""
    root = os.path.dirname(os.path.dirname(_RUNTIME))
    sys.path.insert(0, root)
    try:
        from importlib import import_module

        import_module(os.environ.pop("HEADWAY_ZYGOTE")).serve(root, _chain)
    except Exception as cause:
        _warn(cause)
        os._exit(1)


def _interrupt_script() -> None:
    """Raise SIGINT again as soon as the script begins: what is raised here would be an error of `site`, and exit 1."""
    import signal

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)


if os.environ.get("HEADWAY_ZYGOTE"):
    _serve()
    _lead()
else:
    _interrupted = False
    try:
        _keep_board()
        _record()
    except KeyboardInterrupt:
        _interrupted = True
    _chain()
    if _interrupted:
        _interrupt_script()
