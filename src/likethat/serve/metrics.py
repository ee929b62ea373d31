"""Counts and times of requests, in the text form that Prometheus reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # seconds
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self.buckets = [0] * (len(BOUNDS) + 1)  # of requests with pictures, by seconds
        self.seconds = 0.0

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, status] += 1
        if method == "POST":
            self.buckets[sum(seconds > bound for bound in BOUNDS)] += 1
            self.seconds += seconds

    def text(self, gauges: Mapping[str, float]) -> str:
        lines = ["# TYPE likethat_requests_total counter"]
        for (method, route, status), count in sorted(self.requests.items()):
            lines.append(f'likethat_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
        lines.append("# TYPE likethat_post_seconds histogram")
        total = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self.buckets, strict=True):
            total += count
            lines.append(f'likethat_post_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"likethat_post_seconds_sum {self.seconds:.6f}", f"likethat_post_seconds_count {total}"]
        for name, value in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE likethat_{name} {kind}", f"likethat_{name} {value:g}"]
        return "\n".join(lines) + "\n"


class Counted:
    """Counts every request of the application within."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            # The route's pattern, not the path, and known methods: visitors must not be able to grow the table.
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.count(method, route, status, time.monotonic() - started)
