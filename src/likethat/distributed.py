"""Several processes that work on one run, one a GPU, as torchrun starts them. In a single process nothing here does
anything.

Passes over images are shared out in whole batches, an earlier process taking earlier ones. So every image meets the
network in the same company as in one process, its figures have the same bits, and ties fall as they do there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from likethat.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Store

Value = TypeVar("Value")

PATIENCE = timedelta(minutes=30)  # with a process that neither answers nor closes its connection
BEAT = 1.0  # seconds between signs of life
LAST_BEAT = 10.0  # seconds that the last one may take
MOST_BYTES = 1 << 28  # that travel at a time


_connected = False  # in a session


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if _connected else 1


def rank() -> int:
    return int(os.environ["RANK"]) if _connected else 0


def local_rank() -> int:
    """The number of this process on its machine, and that of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if _connected else 0


def local_world() -> int:
    """How many processes there are on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _connected else 1


def is_first() -> bool:
    """The first process writes and tells; the others compute."""
    return rank() == 0


@contextmanager
def session() -> Iterator[None]:
    """Connects the processes that torchrun started, if it did, while the block runs. Where one is lost, the others say
    so and end."""
    global _connected
    if not launched():
        yield
        return
    import torch
    import torch.distributed as dist

    _connected = True
    store = _meet()
    dist.init_process_group(store=dist.PrefixStore("group", store), rank=rank(), world_size=world(), timeout=PATIENCE)
    if torch.cuda.is_available() and local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(store, over), daemon=True)
    try:
        store.set(f"life{rank()}", "begins")
        heart.start()
        barrier()
        yield
        dist.destroy_process_group()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would come before the message
        raise UserError(f"{_who_is_lost(store)}; what was saved is unharmed, go on with --resume.") from error
    finally:
        over.set()
        if heart.is_alive():  # in the store when the interpreter ends, it would take the process with it
            heart.join(LAST_BEAT)
        _connected = False


def _meet() -> Store:
    """A store for the processes of this start alone. torchrun's outlives them, with what an earlier start left there.
    So the first process makes up a name, and whoever takes an earlier one for it is not answered."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(address, port, is_master=is_host, timeout=PATIENCE, wait_for_workers=False)
    own = uuid.uuid4().hex
    if rank() == 0:
        store.set("start", own)
        store.set(f"{own}/answer", " ".join(store.get(f"{own}/{number}").decode() for number in range(1, world())))
        return dist.PrefixStore(own, store)
    last = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < last:
        start = store.get("start").decode()
        store.set(f"{start}/{rank()}", own)
        time.sleep(0.1)
        if store.check([f"{start}/answer"]) and own in store.get(f"{start}/answer").decode():
            return dist.PrefixStore(start, store)
    raise UserError("The first process did not answer; look at what it says, and start again.")


def _beat(store: Store, over: threading.Event) -> None:
    """Signs of life, also while the process waits for another one."""
    name, count = f"life{rank()}", 0
    with suppress(RuntimeError):  # the store is gone, and with it whoever would read them
        while not over.wait(BEAT):
            store.set(name, str(count))
            count += 1


def _who_is_lost(store: Store) -> str:
    others = [number for number in range(world()) if number != rank()]  # whoever asks is there

    def signs() -> list[bytes]:
        return [store.get(f"life{number}") for number in others]

    try:
        before = signs()
        time.sleep(3 * BEAT)
        lost = [str(number) for number, old, new in zip(others, before, signs(), strict=True) if old == new]
    except RuntimeError:
        return "The machine that the processes met on was lost"
    if not lost:
        return "The connection to another process was lost"
    named = f"Process {lost[0]} was" if len(lost) == 1 else f"Processes {', '.join(lost)} were"
    return f"{named} lost (of those numbered 0 to {world() - 1})"


def own_part(count: int, batch_size: int = 1) -> slice:
    """Which of `count` things in batches this process sees to: whole batches, about as many as any other."""
    batches = -(-count // batch_size)
    first, end = (batches * number // world() * batch_size for number in (rank(), rank() + 1))
    return slice(min(first, count), min(end, count))


def barrier() -> None:
    """Goes on when every process has come here."""
    any_process(False)


def any_process(flag: bool) -> bool:
    """Whether any process says so. It goes over the CPUs, so no GPU is waited for."""
    if world() == 1:
        return flag
    import torch
    import torch.distributed as dist

    votes = torch.tensor(int(flag))
    dist.all_reduce(votes)
    return bool(votes)


def first_says(value: Value) -> Value:
    """What the first process gives, on all."""
    if world() == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def join(values: Tensor) -> Tensor:
    """Every value comes from the one process that has set it; on the others it is zero. In place, to the bit."""
    if world() > 1:
        import torch
        import torch.distributed as dist

        for block in values.view(-1).view(torch.uint8).split(MOST_BYTES):  # sums of whole numbers are exact
            dist.all_reduce(block)
    return values


def total(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world() > 1:
        import torch.distributed as dist

        dist.all_reduce(values)
    return values


def join_nearest(distance_k: Tensor, *others_k: Tensor) -> tuple[Tensor, ...]:
    """The k nearest of all processes' k nearest (the last dimension of `distance_k`), and what `others_k` say of them.
    The sort is stable, so those of an earlier process win ties."""
    if world() == 1:
        return distance_k, *others_k
    import torch
    import torch.distributed as dist

    every = [torch.empty_like(distance_k) for _ in range(world())]
    dist.all_gather(every, distance_k.contiguous())
    k = distance_k.shape[-1]
    order_k = torch.cat(every, -1).argsort(dim=-1, stable=True)[..., :k]
    mine_k, place_k = order_k // k == rank(), order_k % k
    found = []
    for values_k in (distance_k, *others_k):
        shape = (*place_k.shape, *[1] * (values_k.ndim - place_k.ndim))
        own_k = values_k.gather(place_k.ndim - 1, place_k.view(shape).expand_as(values_k))
        found.append(join(torch.where(mine_k.view(shape), own_k, torch.zeros_like(own_k)).contiguous()))
    return tuple(found)


def from_first(values: Tensor) -> None:
    """Those of the first process take the place of this one's."""
    if world() > 1:
        import torch.distributed as dist

        whole = values.contiguous()
        dist.broadcast(whole, 0)
        values.copy_(whole)


def same_model(model: nn.Module) -> None:
    """All processes go on with the first one's model, however alike theirs are."""
    for values in model.state_dict().values() if world() > 1 else ():
        from_first(values)
