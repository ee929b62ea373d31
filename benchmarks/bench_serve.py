"""How `likethat serve` does under load: 50 clients at once for a minute, and its memory over 10,000 requests.

    python benchmarks/bench_serve.py [--run RUN] [--backbone tf_efficientnet_lite0] [--seconds 60] [--requests 10000]

A real server in a process of its own, real clients over the network of this machine. Without --run a model with random
weights is served: it costs what a trained one costs. Memory is watched with timm's smallest network, so that 10,000
requests take minutes, not an hour. Exit code 1 where a goal is missed.
"""

import argparse
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from likethat.bench.measure import Goal, verdict
from likethat.config.presets import resolve
from likethat.models.protopnet import create_protopnet
from likethat.runs import layout
from likethat.runs.atomic_files import save_tensors, write_json
from likethat.runs.classifier import Prototype
from likethat.runs.layout import DataRecord, RunRecord

CLASSES, PER_CLASS, CLIENTS = 8, 10, 50
ALONE_SECONDS = 10
GOAL_ALONE = Goal(1.0)  # seconds in which one client has its answer
GOAL_THROUGHPUT = Goal(1.0, at_least=True)  # answers a second of all clients together, next to those of one alone
GOAL_TAIL = Goal(3.0)  # p99 next to p50
GOAL_MEMORY = Goal(1.05)  # after all requests, next to after the first tenth


def make_run(run: Path, backbone: str, **options: object) -> Path:
    config = resolve("default", backbone=backbone, weights="none", prototypes_per_class=PER_CLASS, **options)
    model = create_protopnet(config.model, [PER_CLASS] * CLASSES)
    with torch.no_grad():
        model.last_layer.weight.mul_(model.own_KP)  # as the solved last layer has it, all but a few
    classes = tuple(f"class {k}" for k in range(CLASSES))
    record = DataRecord("nowhere", "folder", classes, {"train": 0, "val": 0, "test": 0}, (), "none")
    (run / "prototypes").mkdir(parents=True)
    Image.new("RGB", (90, 70), "teal").save(run / "prototypes" / "part.jpg")
    RunRecord(config, record, (PER_CLASS,) * CLASSES).write(run)
    save_tensors(run / layout.MODEL, model.state_dict())
    box, part = (10.0, 10.0, 50.0, 50.0), "prototypes/part.jpg"
    places = (box, box, None, 0.1, part, part, box)
    labels = [k for k in range(CLASSES) for _ in range(PER_CLASS)]
    prototypes = [Prototype(p, k, classes[k], "a.jpg", "", 0, 0, *places) for p, k in enumerate(labels)]
    write_json(run / layout.PROTOTYPES, {"prototypes": [asdict(prototype) for prototype in prototypes]})
    return run


@contextmanager
def serving(run: Path) -> Iterator[tuple[int, int]]:
    """The server's port and process id."""
    command = [sys.executable, "-m", "likethat", "serve", str(run), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            found = re.search(r"127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found, "the server did not start"
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def photographs(count: int) -> list[bytes]:
    """JPEG files of 500 x 375 pixels, smooth as photographs are."""
    generator, files = np.random.default_rng(0), []
    for _ in range(count):
        noise = Image.fromarray(generator.integers(0, 256, (15, 20, 3), np.uint8))
        buffer = io.BytesIO()
        noise.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


class Client:
    """One connection that stays open. Every second request of a mixed load is one of the page."""

    def __init__(self, port: int, pictures: list[bytes]) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.pictures, self.number = pictures, 0

    def ask(self, path: str = "/api/explain") -> tuple[int, bytes]:
        self.number += 1
        self.connection.request("POST", path, self.pictures[self.number % len(self.pictures)])
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def get(self, path: str) -> int:
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        answer.read()
        return answer.status

    def mixed(self) -> list[int]:
        """Four requests: one for an answer, three that the page makes."""
        kept, document = self.ask("/api/pictures")
        id = json.loads(document)["pictures"][0]["id"] if kept == 201 else "none"
        return [self.ask()[0], kept, self.get(f"/api/pictures/{id}"), self.get(f"/pictures/{id}/picture.jpg")]


def loaded(port: int, pictures: list[bytes], clients: int, seconds: float) -> tuple[list[float], Counter[int], float]:
    """The seconds of every answer, the answers by status, and how many came in a second."""
    began = time.perf_counter()
    end = began + seconds
    lock, times, statuses = threading.Lock(), [], Counter[int]()

    def work(number: int) -> None:
        client = Client(port, pictures[number % len(pictures) :] + pictures[: number % len(pictures)])
        while time.perf_counter() < end:
            started = time.perf_counter()
            status, _ = client.ask()
            with lock:
                times.append(time.perf_counter() - started)
                statuses[status] += 1

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(work, range(clients)))
    return times, statuses, len(times) / (time.perf_counter() - began)


def resident(pid: int) -> float:
    """Megabytes of memory the process has."""
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout) / 1024


def memory(port: int, pid: int, pictures: list[bytes], requests: int) -> tuple[float, float, Counter[int]]:
    """Memory after the first tenth of the requests and after all of them."""
    statuses: Counter[int] = Counter()

    def some(count: int) -> float:
        def work(_: int) -> None:
            client = Client(port, pictures)
            for _ in range(count // 4 // 8):
                statuses.update(client.mixed())

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        return resident(pid)

    first = some(requests // 10)
    return first, some(requests - requests // 10), statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run to serve instead of random weights")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load by 50 clients")
    parser.add_argument("--requests", type=int, default=10_000, help="of the test of memory; 0 leaves it out")
    args = parser.parse_args()
    pictures = photographs(16)
    rows: list[tuple[str, float, Goal]] = []
    with tempfile.TemporaryDirectory() as name:
        run = args.run or make_run(Path(name) / "run", args.backbone)
        with serving(run) as (port, _):
            loaded(port, pictures, 1, 2)  # warm
            alone, _, rate_alone = loaded(port, pictures, 1, ALONE_SECONDS)
            together, statuses, rate = loaded(port, pictures, CLIENTS, args.seconds)
            p50, p99 = np.percentile(together, [50, 99])
            wrong = sum(statuses.values()) - statuses[200]
            print(f"{args.run or args.backbone} on {os.cpu_count()} cores, JPEG files of 500 x 375 pixels")
            print(f"one client:  p50 {np.median(alone):.3f} s, {rate_alone:.1f} answers a second")
            print(
                f"{CLIENTS} clients: p50 {p50:.3f} s, p99 {p99:.3f} s, {rate:.1f} answers a second over "
                f"{args.seconds:.0f} s, {wrong} of {len(together)} refused or failed"
            )
            rows.append(("one client's p50, in seconds", float(np.median(alone)), GOAL_ALONE))
            rows.append((f"throughput of {CLIENTS} clients / of one", rate / rate_alone, GOAL_THROUGHPUT))
            rows.append(("p99 / p50", float(p99 / p50), GOAL_TAIL))
            rows.append(("refused or failed", float(wrong), Goal(0)))
        if args.requests:
            small = make_run(Path(name) / "small", "test_resnet", latent_width=16, input_size=96)
            with serving(small) as (port, pid):
                first, last, statuses = memory(port, pid, pictures, args.requests)
            total = sum(statuses.values())
            print(f"memory: {first:.0f} MB after {total // 10} requests, {last:.0f} MB after {total}")
            rows.append(("memory after all / after a tenth", last / first, GOAL_MEMORY))
            failed = total - statuses[200] - statuses[201]
            rows.append(("refused or failed among them", float(failed), Goal(0)))
    met = True
    for what, value, goal in rows:
        met &= goal.met_by(value)
        print(f"{what:40}{value:9.3f}  {goal.next_to(value)}")
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
