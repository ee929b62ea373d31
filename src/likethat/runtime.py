"""The machine: devices, seeds, precision, and orderly stops."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

from likethat.distributed import local_rank, local_world_size, world_size
from likethat.errors import Interrupted, UserError

if TYPE_CHECKING:
    import torch

# Of the control groups of Linux, version 2 and 1, as a container sees its own.
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

# glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD and M_MMAP_MAX: so that what is freed is kept, and as a process
# has them that has freed large arrays. Once they are set, glibc adapts them no more; these are the highest it comes to.
KEPT = ((-1, 2**31 - 1), (-2, 2**26), (-4, 0))
AFTERWARDS = ((-1, 2**26), (-2, 2**17), (-3, 2**25), (-4, 2**16))

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")  # CUDA, the CPU; cuBLAS and cuDNN


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device of that name; 'auto' takes CUDA, then Apple's MPS, then the CPU. Of several processes each has
    a CUDA device of its own; MPS has no way between them."""
    import torch

    mps = torch.backends.mps.is_available() and world_size() == 1
    available = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    if name == "auto":
        name = next(kind for kind, usable in available.items() if usable)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"There is no device called '{name}'; choose auto, cpu, cuda or mps.") from error
    if not available.get(device.type, False):
        raise UserError(f"This machine has no {device.type} device that torch can use; pass --device cpu or auto.")
    if device.type != "cuda":
        return device
    # Tensors say cuda:0 of themselves, so the device must too.
    device = torch.device("cuda", local_rank() if device.index is None or world_size() > 1 else device.index)
    if device.index >= torch.cuda.device_count():
        raise UserError(f"There is no {device}; this machine has {torch.cuda.device_count()} CUDA devices.")
    return device


def exact_arithmetic() -> None:
    """Make fp32 mean fp32: no TF32, and the same kernels in every run on the same machine."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


@contextmanager
def tf32_convolutions() -> Iterator[None]:
    """Let convolutions round what they multiply to TF32 in the block, where they are in fp32: as torch does unasked."""
    import torch

    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def wake(device: torch.device) -> None:
    """Let a GPU get ready in a thread: its context and its libraries take a second or more to load, in which the CPU
    may work. Never fork while it does."""
    if device.type == "cuda":
        Thread(target=_load_libraries, args=(device,)).start()


def _load_libraries(device: torch.device) -> None:
    """Do a little of what every network does."""
    import torch

    with suppress(RuntimeError):  # of which whoever needs the device is told
        map_1CHW = torch.nn.functional.conv2d(
            torch.zeros(1, 3, 32, 32, device=device), torch.zeros(8, 3, 3, 3, device=device)
        )
        map_1CHW.flatten(2) @ map_1CHW.flatten(2).mT
        torch.cuda.synchronize(device)


def send(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a tensor to the device without waiting for what the device is doing."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision: in the CPU's memory where its device is MPS, which has none."""
    return value.cpu().double() if value.device.type == "mps" else value.double()


def fetch(*values: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Begin to fetch tensors of one device into the CPU's memory. The function that is returned waits for them, and not
    for what the device has been told to do since."""
    import torch

    if values[0].device.type != "cuda":
        return lambda: tuple(value.cpu() for value in values)
    copies = tuple(value.to("cpu", non_blocking=True) for value in values)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values[0].device))

    def wait() -> tuple[torch.Tensor, ...]:
        arrived.synchronize()
        return copies

    return wait


def usable_processors() -> int:
    """Return how many processors this process may keep busy; processes on one machine share them."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len(processors) // local_world_size())


def seed_for(*position: object) -> int:
    """Return a seed for one place in a run. Every random draw follows from its place, so a resumed run repeats none."""
    digest = hashlib.sha256(repr(position).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class StopFlag:
    """Set by Ctrl-C or SIGTERM; loops ask `check()` where their state can be saved."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, *_: object) -> None:
        if self.requested:  # a second Ctrl-C does not wait, and must not save what is half done
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        if self.requested:
            raise Interrupted


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Let SIGINT and SIGTERM set the flag while the block runs; outside the main thread they are left alone."""
    flag = StopFlag()
    try:
        previous = {number: signal.signal(number, flag.request) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        previous = {}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Keep what is freed in the block for what is needed next, on a CPU with glibc: it would give large arrays back to
    Linux and get them again in every step, each time cleared page by page."""
    if sys.platform != "linux" or device.type != "cpu" or not hasattr(ctypes.CDLL(None), "mallopt"):
        yield
        return
    library = ctypes.CDLL(None)
    for option, value in KEPT:
        library.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in AFTERWARDS:
            library.mallopt(option, value)
        library.malloc_trim(0)


@contextmanager
def memory_shortage_told() -> Iterator[None]:
    """Tell in a sentence when memory runs out in the block, the machine's or a GPU's."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch says so in a RuntimeError; other ones are defects of ours and keep their traceback.
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise UserError("Out of memory; train with a smaller --batch-size or --input-size.") from error


def physical_memory() -> int:
    """Return the bytes of memory this process may have: the machine's, or its container's where that is less; a modest
    guess where the system does not tell."""
    limits = []
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in CONTAINER_LIMITS:
        with suppress(ValueError, OSError):  # no such file, or the word max
            limits.append(int(file.read_text()))
    return min(limits, default=8 * 1024**3)


def open_to_fill(file: Path) -> BinaryIO:
    """Open an existing file to write some of it in place. It is neither mapped nor readable, so that machines that
    share a disk, each with a part of the file, write no bytes of each other's."""
    return os.fdopen(os.open(file, os.O_WRONLY | getattr(os, "O_BINARY", 0)), "wb")


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse a disk that is too full: writing to a memory map there would kill the process without a word."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, and the {what} need {needed / 1e9:.1f} GB: make room, or choose "
            "another folder or a smaller input size"
        )
