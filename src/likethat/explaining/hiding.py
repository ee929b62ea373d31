"""Hides parts of a picture from the networks: the honest test of an explanation.

A rectangle is painted with the mean colour of all that stays visible. That is done in a network's input, where every
pixel is painted that has taken anything from under the rectangle when the picture was scaled: whatever the picture had
there, the answer is the same to the last bit.
A painted rectangle is no absence, though. It has edges and a colour, which may look like something by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL import ImageDraw
from torch import Tensor

from likethat.data.decode import Box, View
from likethat.errors import UserError
from likethat.explaining.draw.render import scaled
from likethat.runs.classifier import PreparedPicture

MOST_HIDDEN = 20  # rectangles at a time
GREY = 128.0  # of a picture of which nothing is left


def read_box(text: str) -> Box:
    """Read a rectangle as a user writes it: x0,y0,x1,y1."""
    try:
        x0, y0, x1, y1 = map(float, text.split(","))
    except ValueError:
        x0 = y0 = x1 = y1 = math.nan
    if not (math.isfinite(x0 + y0 + x1 + y1) and x0 < x1 and y0 < y1):
        raise UserError(f"A part to hide is written x0,y0,x1,y1 with x0 < x1 and y0 < y1, not '{text[:80]}'.")
    return x0, y0, x1, y1


def hide_boxes(prepared: PreparedPicture, boxes: Sequence[Box]) -> PreparedPicture:
    """Hide rectangles in pixels of the file, as the boxes of explanations are."""
    return hide_shares(prepared, [prepared.views[0].from_file(box) for box in boxes])


def hide_shares(prepared: PreparedPicture, shares: Sequence[Box]) -> PreparedPicture:
    """Hide rectangles in shares of what the networks see."""
    if not shares:
        return prepared
    if len(shares) > MOST_HIDDEN:
        raise UserError(f"At most {MOST_HIDDEN} parts can be hidden at a time; these are {len(shares)}.")
    if any(min(x1, y1) <= 0 or max(x0, y0) >= 1 for x0, y0, x1, y1 in shares):
        raise UserError("A part to hide lies outside of the picture; give its corners in pixels of the picture.")
    hidden = tuple((max(x0, 0.0), max(y0, 0.0), min(x1, 1.0), min(y1, 1.0)) for x0, y0, x1, y1 in shares)
    pixels = tuple(
        painted(pixels_3HW, covered(hidden, view))
        for pixels_3HW, view in zip(prepared.pixels, prepared.views, strict=True)
    )
    return replace(_with_image(prepared, hidden), pixels=pixels, hidden=hidden)


def covered(shares: Sequence[Box], view: View) -> Tensor:
    """Return H x W: True at every pixel of a network's input that has taken anything from under a rectangle."""
    left, top, right, bottom = view.crop
    (height, width), hidden_HW = view.input_hw, torch.zeros(view.input_hw, dtype=torch.bool)
    for x0, y0, x1, y1 in shares:
        rows, columns = _taken(y0, y1, bottom - top, height), _taken(x0, x1, right - left, width)
        hidden_HW[rows, columns] = True
    return hidden_HW


def _taken(low: float, high: float, source: int, size: int) -> slice:
    """Return the pixels of a line of `size`, scaled from `source` ones, that have taken from between two shares of it.

    The rectangle covers every pixel of the source that it touches. A pixel takes from as far as one pixel around its
    middle, of the line or of its source, whichever is larger.
    """
    scale = size / source
    # Rounded first: a side that lies on the border of two pixels does so up to rounding only.
    low, high = math.floor(round(low * source, 3)) * scale, math.ceil(round(high * source, 3)) * scale
    reach = 0.5 if source == size else max(1.0, scale)
    first, last = math.floor(round(low + 0.5 - reach, 6)), math.ceil(round(high - 0.5 + reach, 6))
    return slice(max(0, first), last)


def painted(pixels_3HW: Tensor, hidden_HW: Tensor) -> Tensor:
    """Return the picture with the mean colour of its visible pixels where it is hidden."""
    return torch.where(hidden_HW, mean_colour(pixels_3HW, hidden_HW)[:, None, None], pixels_3HW)


def mean_colour(pixels_3HW: Tensor, hidden_HW: Tensor) -> Tensor:
    """Return the mean of the visible pixels, three bytes."""
    visible_3N = pixels_3HW[:, ~hidden_HW].double()
    mean_3 = visible_3N.mean(1) if visible_3N.shape[1] else torch.full((3,), GREY, dtype=torch.double)
    return mean_3.round().to(pixels_3HW.dtype)


def colour_of_hidden(prepared: PreparedPicture) -> tuple[int, int, int]:
    """Return the colour that the parts of a prepared picture were painted with, for those who show it."""
    red, green, blue = mean_colour(prepared.pixels[0], covered(prepared.hidden, prepared.views[0])).tolist()
    return red, green, blue


def _with_image(prepared: PreparedPicture, hidden: Sequence[Box]) -> PreparedPicture:
    """Paint the same on the picture that people see, which may be a smaller copy of the one that was read."""
    view, image = prepared.views[0], prepared.image.copy()
    colour = colour_of_hidden(replace(prepared, hidden=tuple(hidden)))
    (height, width), draw = view.input_hw, ImageDraw.Draw(image)
    for share in hidden:
        x0, y0, x1, y1 = view.to_upright(scaled(share, width, height))
        across, down = image.width / view.upright_hw[1], image.height / view.upright_hw[0]
        corners = math.floor(x0 * across), math.floor(y0 * down), math.ceil(x1 * across) - 1, math.ceil(y1 * down) - 1
        draw.rectangle((corners[0], corners[1], max(corners[2], corners[0]), max(corners[3], corners[1])), fill=colour)
    return replace(prepared, image=image)
