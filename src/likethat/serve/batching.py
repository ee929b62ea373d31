"""Requests that come at the same time share a forward pass; too many are turned away, and who leaves makes room."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from likethat.models.protopnet import Output
from likethat.runs.classifier import Classifier, PreparedPicture
from likethat.serve.problems import Refused

T = TypeVar("T")


class Slots:
    """Room for so many requests at a time."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self.seconds = 0.1  # a request lately took, for Retry-After

    @contextmanager
    def one(self) -> Iterator[None]:
        if self.taken >= self.most:
            raise Refused(503, "Too many pictures are waiting; try again in a moment.", self.seconds * self.most)
        self.taken += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.taken -= 1
            share = (time.monotonic() - started) / (self.taken + 1)  # requests beside it took their part
            self.seconds += 0.1 * (share - self.seconds)


@dataclass(eq=False)
class Job:
    prepared: PreparedPicture
    outputs: asyncio.Future[list[Output]]


class Batcher:
    """Takes all pictures that wait, up to a batch, whenever the networks are free. Nobody waits for company."""

    def __init__(self, classifier: Classifier, most: int, seconds: float) -> None:
        """Prepare for pictures; a forward pass may take so many seconds."""
        self.classifier, self.most, self.seconds = classifier, most, seconds
        self.waiting: deque[Job] = deque()
        self.wake = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "networks")
        self.batches = self.pictures = 0

    async def outputs(self, prepared: PreparedPicture) -> list[Output]:
        """Return one `Output` a network, each over this one picture."""
        job = Job(prepared, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.wake.set()
        try:
            while True:
                before = self.batches
                done, _ = await asyncio.wait({job.outputs}, timeout=self.seconds)
                if done:
                    return job.outputs.result()
                if self.batches == before:  # the networks do not go on
                    raise too_slow(self.seconds)
        finally:
            job.outputs.cancel()
            if job in self.waiting:  # its client has left
                self.waiting.remove(job)

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self.wake.wait()
            jobs = [self.waiting.popleft() for _ in range(min(self.most, len(self.waiting)))]
            if not jobs:
                self.wake.clear()
                continue
            self.batches += 1
            self.pictures += len(jobs)
            try:
                batch = [job.prepared for job in jobs]
                outputs = await loop.run_in_executor(self.thread, self.classifier.outputs, batch)
            except Exception as error:  # every client hears of it, and the next batch is served
                problem: Exception = error
                if isinstance(error, MemoryError) or "out of memory" in str(error):
                    problem = Refused(503, "The machine is out of memory; try again in a moment.", 5)
                for job in jobs:
                    if not job.outputs.done():
                        job.outputs.set_exception(problem)
                continue
            for number, job in enumerate(jobs):
                if not job.outputs.done():
                    job.outputs.set_result([output.one(number) for output in outputs])


def too_slow(seconds: float) -> Refused:
    return Refused(503, f"The answer took longer than {seconds:g} seconds; try again.", seconds)


class Turns:
    """So many threads for one kind of work, which is done in the order in which it comes. The time it may take begins
    with its turn: who was let in is answered, however many are before."""

    def __init__(self, threads: int, name: str, seconds: float) -> None:
        self.threads, self.free, self.seconds = ThreadPoolExecutor(threads, name), asyncio.Semaphore(threads), seconds

    async def take(self, function: Callable[..., T], *arguments: Any) -> T:
        async with self.free:
            try:
                async with asyncio.timeout(self.seconds):
                    return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
            except TimeoutError as error:
                raise too_slow(self.seconds) from error


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; drop the work when the client goes away.

    The request's body must have been read: from then on its channel tells of nothing but the client's leaving.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaving(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        leaving.cancel()


async def _leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
