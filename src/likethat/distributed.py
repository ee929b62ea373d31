"""What the processes of one run, one a GPU, as torchrun starts them, say to each other. In a single process every
function here returns at once.

Passes over images are sharded in whole batches, an earlier process taking earlier ones. So every image meets the
network in the same company as in one process, its figures have the same bits, and ties fall as they do there.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

from likethat.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import Store

Value = TypeVar("Value")

PATIENCE = timedelta(minutes=30)  # with a process that neither answers nor closes its connection
MOST_BYTES = 1 << 28  # that travel at a time
LAST_WORDS = 5.0  # seconds that a process which is asked to end has for them

_connected = False  # in a session
_gpu_bytes: int | None = None  # there, memory of the smallest GPU that any process has


def launched() -> bool:
    """Tell whether torchrun started this process as one of several."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ["WORLD_SIZE"]) if _connected else 1


def rank() -> int:
    """Return the number of this process."""
    return int(os.environ["RANK"]) if _connected else 0


def local_rank() -> int:
    """Return the number of this process on its machine, which is that of its GPU, too."""
    return int(os.environ["LOCAL_RANK"]) if _connected else 0


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _connected else 1


def is_main_process() -> bool:
    """Tell whether this process writes and prints; the others only compute."""
    return rank() == 0


@contextmanager
def session() -> Iterator[None]:
    """Connect the processes that torchrun started, if it did, for the block. Where one is lost, the others end."""
    global _connected, _gpu_bytes
    if not launched():
        yield
        return
    import torch
    import torch.distributed as dist

    _connected, gpu_bytes = True, 0
    before = None
    with suppress(ValueError):  # not the main thread
        before = signal.signal(signal.SIGTERM, _end_soon)
    dist.init_process_group(store=_meet(), rank=rank(), world_size=world_size(), timeout=PATIENCE)
    if torch.cuda.is_available() and local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
        gpu_bytes = torch.cuda.get_device_properties(local_rank()).total_memory
    try:
        _gpu_bytes = least_of_all(gpu_bytes)
        yield
        dist.destroy_process_group()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise UserError(
            "Another process of this run was lost; what was saved is unharmed, go on with --resume (predict: with the "
            "same command)."
        ) from error
    finally:
        _connected, _gpu_bytes = False, None


def gpu_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU; with several processes, of the smallest GPU that any of them has: their work
    is cut by it."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if _gpu_bytes is None else _gpu_bytes


def _end_soon(*_: object) -> None:
    """End, but not at once: torchrun asks for it as soon as a process is lost, and the others have yet to say so."""
    timer = Timer(LAST_WORDS, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()


def _meet() -> Store:
    """Return a store for the processes of this start alone. torchrun's outlives them, and the addresses that an earlier
    start left there would send this one to processes that are gone; nothing that torchrun says tells every start from
    the others. So the main process makes up a name, and whoever takes an earlier one for it is not answered."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(address, port, is_master=is_host, timeout=PATIENCE, wait_for_workers=False)
    own = uuid.uuid4().hex
    if rank() == 0:
        store.set("start", own)
        names = [store.get(f"{own}/{number}").decode() for number in range(1, world_size())]
        store.set(f"{own}/answer", " ".join(names))
        return dist.PrefixStore(own, store)
    last = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < last:
        start = store.get("start").decode()
        store.set(f"{start}/{rank()}", own)
        time.sleep(0.1)
        if store.check([f"{start}/answer"]) and own in store.get(f"{start}/answer").decode():
            return dist.PrefixStore(start, store)
    raise UserError("The main process did not answer; look at what it says, and start again.")


def own_shard(count: int, batch_size: int = 1) -> slice:
    """Return which of `count` things this process sees to: whole batches, about as many as any other process's."""
    batches = -(-count // batch_size)
    first, end = (batches * number // world_size() * batch_size for number in (rank(), rank() + 1))
    return slice(min(first, count), min(end, count))


def barrier() -> None:
    """Wait until every process has come here."""
    any_process(False)


def any_process(flag: bool) -> bool:
    """Tell whether the flag is set on any process. It travels between CPUs, so no GPU is waited for."""
    if world_size() == 1:
        return flag
    import torch
    import torch.distributed as dist

    votes = torch.tensor(int(flag))
    dist.all_reduce(votes)
    return bool(votes)


def least_of_all(number: int) -> int:
    """Return the least that any process has."""
    if world_size() == 1:
        return number
    import torch
    import torch.distributed as dist

    votes = torch.tensor(number)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return int(votes)


def broadcast_object(value: Value) -> Value:
    """Return the main process's value on all processes."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_rows(values: Tensor) -> Tensor:
    """Fill in the rows that other processes computed, in place and to the bit. Rows are zero on all but one of them."""
    if world_size() > 1:
        import torch
        import torch.distributed as dist

        for block in values.view(-1).view(torch.uint8).split(MOST_BYTES):  # sums of whole numbers are exact
            dist.all_reduce(block)
    return values


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over all processes, in place."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(values)
    return values


def gather_nearest(distance_k: Tensor, *others_k: Tensor) -> tuple[Tensor, ...]:
    """Return the k nearest of all processes' k nearest (the last dimension of `distance_k`), and what `others_k` say of
    them. The sort is stable, so those of an earlier process win ties."""
    if world_size() == 1:
        return distance_k, *others_k
    import torch
    import torch.distributed as dist

    every = [torch.empty_like(distance_k) for _ in range(world_size())]
    dist.all_gather(every, distance_k.contiguous())
    k = distance_k.shape[-1]
    order_k = torch.cat(every, -1).argsort(dim=-1, stable=True)[..., :k]
    mine_k, place_k = order_k // k == rank(), order_k % k
    found = []
    for values_k in (distance_k, *others_k):
        shape = (*place_k.shape, *[1] * (values_k.ndim - place_k.ndim))
        own_k = values_k.gather(place_k.ndim - 1, place_k.view(shape).expand_as(values_k))
        found.append(gather_rows(torch.where(mine_k.view(shape), own_k, torch.zeros_like(own_k)).contiguous()))
    return tuple(found)


def broadcast_tensor(values: Tensor) -> None:
    """Replace the values by the main process's."""
    if world_size() > 1:
        import torch.distributed as dist

        whole = values.contiguous()
        dist.broadcast(whole, 0)
        values.copy_(whole)


def broadcast_model(model: nn.Module) -> None:
    """Replace the model's parameters and buffers by the main process's, however alike they are."""
    for values in model.state_dict().values() if world_size() > 1 else ():
        broadcast_tensor(values)
