"""Pictures that look nearly alike across parts, as those of a burst do: accuracies on them do not hold.

A picture's look is the perceptual hash of ImageHash with 256 bits: which of its 16 x 16 lowest frequencies are above
their median. On CUB-200-2011 with 64 bits, one could not tell bursts from any two dark birds on a twig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from likethat.data.dataset import PARTS, DataSet

SIDE = 16  # of the square of frequencies
ALIKE = 60  # bits of 256 that differ at most; of two pictures that have nothing in common about 128 do
MOST_PAIRS = (
    300_000_000  # that are all compared; of more, those that agree in one of KEYS drawn sets of low frequencies
)
KEYS, KEY_BITS, LOW = 16, 16, 8
CHUNK = 4_000_000  # pairs in memory
MISSING = "near-duplicates were not looked for, which needs another package; `pip install ImageHash`"


@dataclass(frozen=True, slots=True)
class NearDuplicate:
    """A picture and the most similar one of an earlier part."""

    path: str
    part: str
    other: str
    other_part: str
    bits: int  # of 256 that differ


@cache
def find_hasher() -> Any:
    """Return ImageHash's function, or None where it is not installed, as on machines that only train."""
    try:
        from imagehash import phash
    except ImportError:
        return None
    return phash


def look_of(pixel_HW3: np.ndarray) -> str | None:
    """Return the look of a picture as the network sees it, in hexadecimal digits."""
    hasher = find_hasher()
    return None if hasher is None else np.packbits(hasher(Image.fromarray(pixel_HW3), SIDE).hash).tobytes().hex()


def find_near_duplicates(
    dataset: DataSet, look_by_path: Mapping[str, str], sha256: Mapping[str, str]
) -> tuple[NearDuplicate, ...]:
    """Return every picture that looks nearly like one of an earlier part, the most similar first. Copies of a file are
    told of elsewhere."""
    paths = {part: [s.path for s in dataset.part(part) if s.path in look_by_path] for part in PARTS}
    bit_NF = {part: _unpack([look_by_path[path] for path in own]) for part, own in paths.items()}
    nearest: dict[str, NearDuplicate] = {}
    for part, earlier in (("val", "train"), ("test", "train"), ("test", "val")):
        for row, other, bits in _alike(bit_NF[part], bit_NF[earlier]):
            path, other_path = paths[part][row], paths[earlier][other]
            if sha256[path] != sha256[other_path] and (path not in nearest or bits < nearest[path].bits):
                nearest[path] = NearDuplicate(path, part, other_path, earlier, bits)
    return tuple(sorted(nearest.values(), key=lambda pair: (pair.bits, pair.path)))


def tell_near_duplicates(dataset: DataSet, pairs: Sequence[NearDuplicate]) -> Iterator[str]:
    """Yield a sentence for every part that has pictures which look nearly like those of an earlier one."""
    for part in PARTS:
        own = [pair for pair in pairs if pair.part == part]
        if own:
            first, total = own[0], len(dataset.part(part))
            yield (
                f"{len(own)} of {total} {part} pictures look nearly like one of an earlier part, such as {first.path} "
                f"and {first.other} ({first.other_part}): accuracies on them do not hold. Put pictures of one burst, "
                "nest or patient into one group, by a table with a column group"
            )


def _unpack(looks: Sequence[str]) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex("".join(looks)), np.uint8).reshape(len(looks), SIDE * SIDE // 8)
    return np.unpackbits(packed, axis=1)


def _alike(bit_NF: np.ndarray, bit_MF: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield row, row and different bits of pairs that are alike; of each of the N rows at least the most similar."""
    if not (len(bit_NF) and len(bit_MF)):
        return
    if len(bit_NF) * len(bit_MF) <= MOST_PAIRS:
        yield from _alike_of_all(bit_NF, bit_MF)
        return
    low = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)[:LOW, :LOW].ravel()
    generator = np.random.default_rng(0)
    for _ in range(KEYS):
        chosen = generator.permutation(low)[:KEY_BITS]
        yield from _alike_of_equal_keys(bit_NF, bit_MF, chosen)


def _alike_of_all(bit_NF: np.ndarray, bit_MF: np.ndarray) -> Iterator[tuple[int, int, int]]:
    sign_NF, sign_FM = 1 - 2 * bit_NF.astype(np.float32), 1 - 2 * bit_MF.astype(np.float32).T
    rows = max(1, CHUNK // len(bit_MF))
    for start in range(0, len(bit_NF), rows):
        different_nM = (bit_NF.shape[1] - sign_NF[start : start + rows] @ sign_FM) / 2
        nearest_n = different_nM.argmin(1)
        bits_n = different_nM[np.arange(len(nearest_n)), nearest_n].astype(int)
        for row in np.flatnonzero(bits_n <= ALIKE).tolist():
            yield start + row, int(nearest_n[row]), int(bits_n[row])


def _alike_of_equal_keys(bit_NF: np.ndarray, bit_MF: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Compare the pairs whose chosen bits are the same: those of one key lie together once they are sorted."""
    power = 1 << np.arange(len(chosen))
    key_N, key_M = bit_NF[:, chosen] @ power, bit_MF[:, chosen] @ power
    order_M = np.argsort(key_M, kind="stable")
    first_N, last_N = (np.searchsorted(key_M[order_M], key_N, side) for side in ("left", "right"))
    total_N = (last_N - first_N).cumsum()
    start = 0
    while start < len(key_N):
        before = total_N[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(total_N, before + CHUNK, "right")))
        count_n = (last_N - first_N)[start:end]
        row_p = np.repeat(np.arange(start, end), count_n)
        place_p = (
            np.arange(len(row_p))
            - np.repeat(count_n.cumsum() - count_n, count_n)
            + np.repeat(first_N[start:end], count_n)
        )
        other_p = order_M[place_p]
        for piece in range(0, len(row_p), CHUNK // 16):
            row_q, other_q = row_p[piece : piece + CHUNK // 16], other_p[piece : piece + CHUNK // 16]
            bits_q = (bit_NF[row_q] != bit_MF[other_q]).sum(1)
            for found in np.flatnonzero(bits_q <= ALIKE).tolist():
                yield int(row_q[found]), int(other_q[found]), int(bits_q[found])
        start = end
