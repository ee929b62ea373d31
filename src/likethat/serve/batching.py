"""Requests that come at the same time share a forward pass; too many are turned away, and who leaves makes room."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

    def __init__(self, classifier: Classifier, most: int) -> None:
        self.classifier, self.most = classifier, most
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
            return await job.outputs
        finally:
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
                    job.outputs.set_result([_one(output, number) for output in outputs])


def _one(output: Output, number: int) -> Output:
    only = slice(number, number + 1)
    return replace(
        output,
        logits_BK=output.logits_BK[only],
        score_BP=output.score_BP[only],
        min_distance_BP=output.min_distance_BP[only],
        maps=replace(output.maps, start_BPHW=output.maps.start_BPHW[only]),
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the work's result; drop the work when the client goes away, and refuse it when it takes too long.

    The request's body must have been read: from then on its channel tells of nothing but the client's leaving.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaving(request))
    try:
        await asyncio.wait({task, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if leaving.done():
            raise ClientDisconnect
        raise Refused(503, f"The answer took longer than {seconds:.0f} seconds; try again.", seconds)
    finally:
        task.cancel()
        leaving.cancel()


async def _leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
