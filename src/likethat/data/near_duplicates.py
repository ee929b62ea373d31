"""Pictures that look nearly alike between splits, as those of a burst do: accuracies on them do not hold.

A picture's look is the perceptual hash of ImageHash with 256 bits: which of its 16 x 16 lowest frequencies are above
their median. On CUB-200-2011 with 64 bits, one could not tell bursts from any two dark birds on a twig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from likethat.data.dataset import PARTS, DataSet, Sample

SIDE = 16  # of the square of frequencies
ALIKE = 60  # bits of 256 that differ at most; of two pictures that have nothing in common about 128 do
OTHER_CLASS = (
    40  # fewer of pictures of different classes: these are hardly of one burst, and may just be composed alike
)
MOST_PAIRS = (
    300_000_000  # that are all compared; of more, those that agree in one of KEYS drawn sets of low frequencies
)
KEYS, KEY_BITS, LOW = 16, 16, 8
CHUNK, KEY_CHUNK = 4_000_000, 100_000  # pairs in memory
MISSING = "near-duplicates were not looked for, which needs another package; `pip install ImageHash`"


@dataclass(frozen=True, slots=True)
class NearDuplicate:
    """A picture and the most similar one of an earlier split."""

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
    """Return every picture that looks nearly like one of an earlier split, the most similar first. Copies of a file are
    told of elsewhere."""
    samples = {part: [s for s in dataset.part(part) if s.path in look_by_path] for part in PARTS}
    looks = {part: _unpack(own, look_by_path) for part, own in samples.items()}
    nearest: dict[str, NearDuplicate] = {}
    for part, earlier in (("val", "train"), ("test", "train"), ("test", "val")):
        for row, other, bits in _alike(looks[part], looks[earlier]):
            path, other_path = samples[part][row].path, samples[earlier][other].path
            if sha256[path] != sha256[other_path] and (path not in nearest or bits < nearest[path].bits):
                nearest[path] = NearDuplicate(path, part, other_path, earlier, bits)
    return tuple(sorted(nearest.values(), key=lambda pair: (pair.bits, pair.path)))


def tell_near_duplicates(dataset: DataSet, pairs: Sequence[NearDuplicate]) -> Iterator[str]:
    """Yield a sentence for every part that has pictures which look nearly like those of an earlier one."""
    for part in PARTS:
        own, total = [pair for pair in pairs if pair.part == part], len(dataset.part(part))
        if 2 * len(own) > total:
            yield (
                f"{len(own)} of {total} {part} pictures look nearly like one of an earlier split: all are composed "
                "alike, or many show one thing. Where several show one patient, nest or burst, say so in a table's "
                "column group"
            )
        elif own:
            first = own[0]
            yield (
                f"{len(own)} of {total} {part} pictures look nearly like one of an earlier split, such as {first.path} "
                f"and {first.other} ({first.other_part}): accuracies on them do not hold. Put pictures of one burst, "
                "nest or patient into one group, by a table with a column group"
            )


class Looks(NamedTuple):
    """The pictures of a part."""

    bit_NF: np.ndarray
    label_N: np.ndarray


def _unpack(samples: Sequence[Sample], look_by_path: Mapping[str, str]) -> Looks:
    packed = bytes.fromhex("".join(look_by_path[sample.path] for sample in samples))
    byte_NF = np.frombuffer(packed, np.uint8).reshape(len(samples), SIDE * SIDE // 8)
    return Looks(np.unpackbits(byte_NF, axis=1), np.array([sample.label for sample in samples], int))


def _alike(own: Looks, others: Looks) -> Iterator[tuple[int, int, int]]:
    """Yield row, row and different bits of pairs that are alike; of each of our own rows at least the most similar."""
    if not (len(own.bit_NF) and len(others.bit_NF)):
        return
    if len(own.bit_NF) * len(others.bit_NF) <= MOST_PAIRS:
        yield from _alike_of_all(own, others)
        return
    low = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)[:LOW, :LOW].ravel()
    generator = np.random.default_rng(0)
    for _ in range(KEYS):
        yield from _alike_of_equal_keys(own, others, generator.permutation(low)[:KEY_BITS])


def _alike_of_all(own: Looks, others: Looks) -> Iterator[tuple[int, int, int]]:
    sign_NF, sign_FM = 1 - 2 * own.bit_NF.astype(np.float32), 1 - 2 * others.bit_NF.astype(np.float32).T
    rows = max(1, CHUNK // len(others.bit_NF))
    for start in range(0, len(sign_NF), rows):
        product_nM = sign_NF[start : start + rows] @ sign_FM  # bits that agree, less those that differ
        for row in np.flatnonzero(product_nM.max(1) >= SIDE * SIDE - 2 * ALIKE).tolist():
            bits_M = (SIDE * SIDE - product_nM[row]) / 2
            judged_M = bits_M + OTHER_CLASS * (own.label_N[start + row] != others.label_N)
            nearest = int(judged_M.argmin())
            if judged_M[nearest] <= ALIKE:
                yield start + row, nearest, int(bits_M[nearest])


def _alike_of_equal_keys(own: Looks, others: Looks, chosen: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Compare the pairs whose chosen bits are the same: those of one key lie together once they are sorted."""
    power = 1 << np.arange(len(chosen))
    key_N, key_M = own.bit_NF[:, chosen] @ power, others.bit_NF[:, chosen] @ power
    order_M = np.argsort(key_M, kind="stable")
    first_N, last_N = (np.searchsorted(key_M[order_M], key_N, side) for side in ("left", "right"))
    count_N = last_N - first_N
    end_N = count_N.cumsum()  # of each row's pairs, when all pairs of all rows stand one after the other
    for start in range(0, int(end_N[-1]), KEY_CHUNK):
        pair_p = np.arange(start, min(start + KEY_CHUNK, end_N[-1]))
        row_p = np.searchsorted(end_N, pair_p, "right")
        other_p = order_M[first_N[row_p] + pair_p - (end_N - count_N)[row_p]]
        bits_p = (own.bit_NF[row_p] != others.bit_NF[other_p]).sum(1)
        judged_p = bits_p + OTHER_CLASS * (own.label_N[row_p] != others.label_N[other_p])
        found = judged_p <= ALIKE
        yield from zip(row_p[found].tolist(), other_p[found].tolist(), bits_p[found].tolist(), strict=True)
