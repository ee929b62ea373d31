"""One process at a time writes into a run folder; the system frees the lock of one that is gone, however it went."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from likethat.data.folder_kinds import LOCK
from likethat.distributed import broadcast_object, is_main_process
from likethat.errors import UserError

MOST_BYTES = 500  # of the file, which says who holds the lock


@contextlib.contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Hold a run folder, there or not, while the block runs; of several processes of one run the main one does."""
    handle, made, problem = -1, [], ""
    if is_main_process():
        try:
            made = [folder for folder in (out, *out.parents) if not os.path.lexists(folder)]
            handle = _take(out)
        except OSError as error:
            problem = f"{out} cannot be written to ({error.strerror or error}); choose another --out."
        except UserError as error:
            problem = str(error)
    try:
        if problem := broadcast_object(problem):
            raise UserError(problem)
        yield
    finally:
        if handle >= 0:
            (out / LOCK).unlink(missing_ok=True)
            os.close(handle)
        with contextlib.suppress(OSError):  # where something was written into them
            for folder in made:
                folder.rmdir()


def check_free(out: Path) -> None:
    """Refuse a folder that another process holds."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        handle = os.open(out / LOCK, os.O_RDWR)
        try:
            _try_lock(handle, out)
        finally:
            os.close(handle)


def _take(out: Path) -> int:
    """Return the open file that holds the lock."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            _try_lock(handle, out)
            with contextlib.suppress(FileNotFoundError):  # its holder has removed it meanwhile
                if os.path.samestat(os.fstat(handle), os.stat(out / LOCK)):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode()[:MOST_BYTES])
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_lock(handle: int, out: Path) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, MOST_BYTES, os.SEEK_SET)  # beyond what is written, which others may then read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.lseek(handle, 0, os.SEEK_SET)
        holder = os.read(handle, MOST_BYTES).decode("utf-8", "replace") or "another process"
        raise UserError(f"{out} is being written by {holder}; wait for it, or choose another --out.") from error
    except OSError:
        pass  # a file system without locks: as before there were any
