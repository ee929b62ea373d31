"""What the server takes on at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    file_bytes: int = 20_000_000  # of one picture
    request_bytes: int = 64_000_000  # of all pictures in a request
    text_bytes: int = 500_000  # of a request without pictures
    files: int = 16  # in a request
    pixels: int = 40_000_000  # of one picture, after decoding
    upload_seconds: float = 30.0  # for a request to arrive
    answer_seconds: float = 30.0  # for each step of an answer, once its turn has come
    drain_seconds: float = 3.0  # for answers under way when the server is stopped
    waiting: int = 64  # requests with pictures that are being read, waiting or computed
    batch: int = 16  # pictures in one forward pass
    kept: int = 200  # asked pictures whose addresses still work
    kept_seconds: float = 3600.0  # since one was last looked at
