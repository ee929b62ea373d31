"""Asked pictures, kept in memory for a while under names nobody can guess, so that their pages can be reloaded."""

from __future__ import annotations

import io
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from PIL import Image

from likethat.explaining.draw.render import jpeg
from likethat.runs.classifier import Prepared
from likethat.serve.limits import Limits
from likethat.serve.problems import Refused


@dataclass
class Kept:
    """What the networks need of a picture, and what a person needs to see of it."""

    id: str
    name: str | None
    prepared: Prepared  # without its image, which is kept as JPEG
    picture: bytes  # JPEG
    size: tuple[int, int]
    seen: float  # monotonic seconds

    def with_image(self) -> Prepared:
        return replace(self.prepared, image=Image.open(io.BytesIO(self.picture)).convert("RGB"))


class Store:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_id: OrderedDict[str, Kept] = OrderedDict()  # least lately seen first

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, name: str | None, prepared: Prepared, picture: bytes) -> Kept:
        empty = replace(prepared, image=Image.new("RGB", (1, 1)))
        kept = Kept(secrets.token_urlsafe(12), name, empty, picture, prepared.image.size, time.monotonic())
        self.by_id[kept.id] = kept
        self.forget()
        return kept

    def get(self, id: str) -> Kept:
        self.forget()
        kept = self.by_id.get(id)
        if kept is None:
            minutes = self.limits.kept_seconds / 60
            raise Refused(
                404,
                f"This picture is not kept any more: pictures stay in memory for {minutes:.0f} minutes after they were "
                "last looked at, and until the server stops; ask again with the picture.",
            )
        kept.seen = time.monotonic()
        self.by_id.move_to_end(id)
        return kept

    def forget(self) -> None:
        oldest = time.monotonic() - self.limits.kept_seconds
        while self.by_id:
            id, first = next(iter(self.by_id.items()))
            if len(self.by_id) <= self.limits.kept and first.seen >= oldest:
                break
            del self.by_id[id]


def as_jpeg(prepared: Prepared) -> bytes:
    return jpeg(prepared.image, quality=92)
