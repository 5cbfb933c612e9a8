"""A folder whose file system is slow, or breaks: a FUSE mount that passes everything on to another folder.

`mounted(root, mount)` serves it from a process of its own, in an environment with the package fusepy. Each write takes
`delay_s`; once the file `root + ".errno"` is there, each call fails with the error that it names: EROFS only what
changes something, as on a file system that the kernel has remounted read-only, any other one (EIO) reading as well.

Needs /dev/fuse, the right to mount and libfuse 2.
"""

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CHANGING = (
    "chmod", "chown", "create", "fsync", "mkdir", "rename", "rmdir", "symlink", "truncate", "unlink", "utimens", "write"
)  # fmt: skip
READING = ("getattr", "open", "read", "readdir", "readlink")


def serve(root: str, mount: str, delay_s: float) -> None:
    """Pass all calls of a mount on to `root`; does not return before it is unmounted."""
    import fuse

    class Passing(fuse.Operations):  # type: ignore[misc]  # the package has no types
        """What it is passed on by: descriptors are this process's own."""

        def __init__(self):
            self.chmod, self.chown = (lambda path, mode: os.chmod(root + path, mode)), (lambda *_: 0)
            self.mkdir, self.rmdir = (
                (lambda path, mode: os.mkdir(root + path, mode)),
                (lambda path: os.rmdir(root + path)),
            )
            self.unlink = lambda path: os.unlink(root + path)
            self.rename = lambda old, new: os.rename(root + old, root + new)
            self.symlink = lambda target, source: os.symlink(source, root + target)
            self.readlink = lambda path: os.readlink(root + path)
            self.readdir = lambda path, _: [".", "..", *os.listdir(root + path)]
            self.open = lambda path, flags: os.open(root + path, (flags & ~os.O_WRONLY & ~os.O_APPEND) | os.O_RDWR)
            self.create = lambda path, mode, _=None: os.open(root + path, os.O_RDWR | os.O_CREAT, mode)
            self.read = lambda _, size, offset, handle: os.pread(handle, size, offset)
            self.release = lambda _, handle: os.close(handle)
            self.utimens = lambda path, times=None: os.utime(root + path, times)

        def __call__(self, op, *arguments):
            """Fail if it is time to."""
            with contextlib.suppress(FileNotFoundError):
                code = getattr(errno, Path(root + ".errno").read_text())
                if op in CHANGING or (op in READING and code != errno.EROFS):
                    raise fuse.FuseOSError(code)
            return super().__call__(op, *arguments)

        def getattr(self, path, _=None):
            found = os.lstat(root + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("st_") and "_ns" not in name}

        def write(self, _, data, offset, handle):
            time.sleep(delay_s)
            return os.pwrite(handle, data, offset)

        def truncate(self, path, length, handle=None):
            os.truncate(root + path if handle is None else handle, length)

    fuse.FUSE(Passing(), mount, foreground=True, nothreads=False)


@contextlib.contextmanager
def mounted(python: Path, root: Path, mount: Path, delay_s: float = 0.0) -> Iterator[bool]:
    """Serve `mount` while the block runs, by the interpreter `python`, which has fusepy; yields whether that worked."""
    root.mkdir()
    mount.mkdir()
    server = subprocess.Popen([python, __file__, root, mount, str(delay_s)])
    try:
        for _ in range(200):
            if os.path.ismount(mount) or server.poll() is not None:
                break
            time.sleep(0.05)
        yield os.path.ismount(mount)
    finally:
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        server.terminate()
        server.wait()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
