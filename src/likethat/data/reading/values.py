"""Values beyond 8 bits: which of them becomes black and which white. The rule is stated, or follows from the kind of
the file; it never depends on what the picture shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

Range = tuple[float, float]  # the values that become black and white

SLACK = 1e-3  # by which floats may leave their range, as rounding does
CHUNK = 1_000_000  # values that are numbers of 64 bits at a time: pictures may be large
DARK = 1 / 8  # share of their range that values use at most when pictures come out nearly black


class UnknownRange(Exception):
    """Values that no rule speaks of."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What was found in a picture of more than 8 bits, and how it was read."""

    kind: str  # such as 16-bit, float, DICOM
    black: float
    white: float
    low: float | None = None  # least and greatest value of the picture, where they are known
    high: float | None = None


def of_bits(bits: int) -> Range:
    return 0.0, 2.0**bits - 1


def to_8_bits(
    values_HW: np.ndarray, kind: str, usual: Range | None, stated: Range | None
) -> tuple[np.ndarray, ValueRange]:
    """Convert gray values to 8 bits: from the stated range, else from the usual one of its kind.

    What lies outside a stated range becomes black or white, and what is not finite becomes black.
    """
    finite_n = values_HW if values_HW.dtype.kind in "biu" else values_HW[np.isfinite(values_HW)]
    low, high = (float(finite_n.min()), float(finite_n.max())) if finite_n.size else (0.0, 0.0)
    chosen = stated or usual
    if chosen is None:
        raise UnknownRange(f"{kind} values from {low:g} to {high:g} have no agreed range")
    black, white = chosen
    if stated is None and (low < black - SLACK * (white - black) or high > white + SLACK * (white - black)):
        raise UnknownRange(
            f"{kind} values are read from {black:g} to {white:g}, and these run from {low:g} to {high:g}"
        )
    pixel_HW = np.empty(values_HW.shape, np.uint8)
    rows = max(1, CHUNK // values_HW.shape[1])
    for start in range(0, len(values_HW), rows):
        exact_hW = values_HW[start : start + rows].astype(np.float64)
        # Rounded half up: of 16 bits, 257 * k gives exactly k, and the steps are of equal width.
        scaled_hW = np.floor((exact_hW - black) * 255 / (white - black) + 0.5)
        pixel_HW[start : start + rows] = np.where(np.isfinite(exact_hW), scaled_hW.clip(0, 255), 0)
    return pixel_HW, ValueRange(kind, black, white, low, high)


def tell_values(found: Iterable[ValueRange]) -> Iterator[str]:
    """Yield a sentence for every kind of pictures beyond 8 bits: what their values are, and how they are read."""
    by_kind: dict[str, list[ValueRange]] = {}
    for values in found:
        by_kind.setdefault(values.kind, []).append(values)
    for kind, pictures in sorted(by_kind.items()):
        seen = [values for values in pictures if values.low is not None and values.high is not None]
        low = min((values.low for values in seen if values.low is not None), default=None)
        high = max((values.high for values in seen if values.high is not None), default=None)
        ranges = sorted({(values.black, values.white) for values in pictures})
        if len(ranges) == 1:
            rule = "{:g} (black) to {:g} (white)".format(*ranges[0])
        else:
            rule = f"their own windows, {len(ranges)} different ones from {ranges[0][0]:g} to {ranges[-1][1]:g}"
        values_text = "" if low is None else f" (values {low:g} to {high:g})"
        yield f"{len(pictures)} pictures of {kind}{values_text} are read from {rule}{_advice(ranges, low, high)}"


def _advice(ranges: list[Range], low: float | None, high: float | None) -> str:
    if len(ranges) > 1 or low is None or high is None:
        return ""
    black, white = ranges[0]
    if high - black >= DARK * (white - black):
        return ""
    top = 2 ** math.ceil(math.log2(max(high, 1) + 1)) - 1 if high == int(high) else high
    stated = f"{min(low, 0):g},{top:g}"
    return f"; most of that is empty, so they look nearly black: state their range, as --value-range {stated}"
