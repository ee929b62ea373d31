"""The scoring sheet as a picture, after the paper's Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from likethat.explaining.attribution import TITLES
from likethat.explaining.boxes import SEEN_ALONE
from likethat.explaining.draw.heat import overlay
from likethat.explaining.draw.render import cut_out, draw_box, fit, in_shares, read_picture, scaled, shrink
from likethat.explaining.matches import Match
from likethat.explaining.scoring import RowGroup, ScoredPicture, Sheet

SCALE = 2  # pixels per unit, for screens and paper with fine dots
MOST_ROWS = 10  # of each class on a long sheet
PAGE_ROWS = 6  # of all classes together on a sheet of one page
PAGE_WIDTH = 1386  # pixels of a sheet of one page: 168 a inch on A4
INK, SOFT, LINE, PAPER, ACCENT, DOUBT = "#1c2024", "#6b7280", "#e2e5e9", "#ffffff", "#0f766e", "#b42318"
MARGIN, PICTURE, GAP = 32, 88, 14
COLUMNS = ("Your picture", "This part", "looks like that", "Training picture")
NUMBERS = MARGIN + (len(COLUMNS) + 1) * (PICTURE + GAP) + 20  # where similarity x connection = points begins
WIDTH = NUMBERS + 330 + MARGIN


class SheetCanvas:
    """Draws in units; grows downwards with the pen `y`."""

    def __init__(self, height: int) -> None:
        self.image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.y = 0

    def text(
        self, x: float, y: float, text: str, size: int, colour: str = INK, *, anchor: str = "la", bold: bool = False
    ) -> None:
        place = (x * SCALE, y * SCALE)
        self.draw.text(place, text, colour, _font_for(text, size), anchor, stroke_width=0.3 * SCALE if bold else 0)

    def picture(self, x: float, y: float, picture: Image.Image, side: int = PICTURE) -> None:
        """Paste the picture into the centre of a square."""
        left = x * SCALE + (side * SCALE - picture.width) // 2
        top = y * SCALE + (side * SCALE - picture.height) // 2
        self.image.paste(picture, (round(left), round(top)))

    def line(self, y: float) -> None:
        self.draw.line((MARGIN * SCALE, y * SCALE, (WIDTH - MARGIN) * SCALE, y * SCALE), LINE, SCALE)


@cache
def _font(size: int, plain: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font for plain English; it has no accents, so other text gets a wider font of the system."""
    for name in () if plain else ("DejaVuSans.ttf", "Arial Unicode.ttf", "segoeui.ttf"):
        with suppress(OSError):
            return ImageFont.truetype(name, size * SCALE)
    return ImageFont.load_default(size * SCALE)


def _font_for(text: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return _font(size, text.removesuffix("…").isascii())


def one_line(text: str, width: float, size: int) -> str:
    """Return the text without line breaks and control characters, cut with an ellipsis where it is too long."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    while text and _font_for(text, size).getlength(text) > width * SCALE:
        text = text[:-2].rstrip() + "…" if len(text) > 2 else ""
    return text


def draw_page_sheet(explanation: ScoredPicture, colours: str = "ember") -> Image.Image:
    """Draw what counts most on one page: the strongest lines of what decides, and of the prediction's points."""
    sheets = explanation.sheets[: 1 if explanation.rival is None else 2]
    image = _draw(explanation, sheets, PAGE_ROWS // len(sheets), colours)
    return shrink(image, round(PAGE_WIDTH * max(image.size) / image.width))


def draw_long_sheet(explanation: ScoredPicture, colours: str = "ember") -> Image.Image:
    """Draw the lines of every sheet, below one another."""
    return _draw(explanation, explanation.sheets, MOST_ROWS, colours)


def _draw(explanation: ScoredPicture, sheets: Sequence[Sheet], most: int, colours: str) -> Image.Image:
    heights = [_height(sheet, most) for sheet in sheets]
    head = 228 if explanation.sees_windows else 210
    canvas = SheetCanvas(head + sum(heights) + 24)
    _draw_head(canvas, explanation)
    canvas.y = head
    for sheet, height in zip(sheets, heights, strict=True):
        start = canvas.y
        _draw_class(canvas, explanation, sheet, most, colours)
        canvas.y = start + height
    return canvas.image


def _draw_head(canvas: SheetCanvas, explanation: ScoredPicture) -> None:
    side, x = 150, MARGIN + 150 + 28
    canvas.picture(MARGIN, 30, fit(explanation.picture, side * SCALE), side)
    width, best = WIDTH - MARGIN - x, explanation.predicted
    canvas.text(x, 44, explanation.heading, 14, SOFT)
    canvas.text(x, 64, one_line(best.name, width, 28), 28, bold=True)
    bar, full = (x, 110), 260
    canvas.draw.rounded_rectangle([v * SCALE for v in (*bar, bar[0] + full, bar[1] + 8)], 4 * SCALE, LINE)
    filled = max(8.0, full * best.probability)
    canvas.draw.rounded_rectangle([v * SCALE for v in (*bar, bar[0] + filled, bar[1] + 8)], 4 * SCALE, ACCENT)
    canvas.text(x + full + 14, 114, f"{best.probability:.1%}", 15, anchor="lm")
    if explanation.path:
        canvas.text(x, 134, one_line(explanation.path, width, 12), 12, SOFT)
    others = ", ".join(f"{sheet.name} {sheet.probability:.1%}" for sheet in explanation.classes[1:])
    if others:
        canvas.text(x, 154, one_line(f"then {others}", width, 12), 12, SOFT)
    if explanation.hidden:
        canvas.text(x, 30, one_line(explanation.hidden_note, width, 12), 12, DOUBT)
    if explanation.verdict:
        colour = DOUBT if explanation.verdict.abstains else INK
        canvas.text(x, 176, one_line(explanation.verdict.sentence(), width, 12), 12, colour)
    if explanation.sees_windows:
        canvas.text(x, 196, SEEN_ALONE, 12, SOFT)


def _height(sheet: Sheet, most: int) -> int:
    groups, others, _ = sheet.main_groups(most)
    return 84 + len(groups) * (PICTURE + GAP) + (26 if others else 0) + 60


def _draw_class(canvas: SheetCanvas, explanation: ScoredPicture, sheet: Sheet, most: int, colours: str) -> None:
    canvas.line(canvas.y)
    width = WIDTH - 2 * MARGIN
    title = one_line(sheet.title, width - 280, 18)
    canvas.text(MARGIN, canvas.y + 18, title, 18, bold=True)
    aside = (
        f"probability {sheet.probability:.1%}" if sheet.rival is None else "connections: to the one less to the other"
    )
    canvas.text(WIDTH - MARGIN, canvas.y + 22, aside, 13, SOFT, anchor="ra")
    for number, name in enumerate((*COLUMNS, TITLES[explanation.attribution])):
        canvas.text(MARGIN + number * (PICTURE + GAP) + PICTURE / 2, canvas.y + 58, name, 11, SOFT, anchor="ma")
    for x, name in _number_columns("Similarity", "x", "Connection", "=", "Points"):
        canvas.text(x, canvas.y + 58, name, 11, SOFT, anchor="ra")
    canvas.y += 80
    groups, others, rest = sheet.main_groups(most)
    for group in groups:
        _draw_group(canvas, explanation, sheet, group, colours)
        canvas.y += PICTURE + GAP
    if others:
        noun = "prototype" if others == 1 else "prototypes"
        canvas.text(MARGIN, canvas.y + 2, f"{others} further {noun}", 13, SOFT)
        canvas.text(WIDTH - MARGIN, canvas.y + 2, f"{rest:+.2f}", 15, SOFT, anchor="ra")
        canvas.y += 26
    canvas.line(canvas.y + 2)
    canvas.text(MARGIN, canvas.y + 14, one_line(sheet.total_title, width - 120, 15), 15, bold=True)
    canvas.text(WIDTH - MARGIN, canvas.y + 14, f"{sheet.logit:.2f}", 15, ACCENT, anchor="ra", bold=True)


def _draw_group(canvas: SheetCanvas, explanation: ScoredPicture, sheet: Sheet, group: RowGroup, colours: str) -> None:
    """Draw one line: the pictures of its strongest prototype, and the points of all."""
    lead, middle, right = group.lead, canvas.y + PICTURE / 2, WIDTH - MARGIN
    for number, picture in enumerate(_row_pictures(explanation, lead.match, colours)):
        canvas.picture(MARGIN + number * (PICTURE + GAP), canvas.y, picture)
    canvas.text(right, middle, f"{group.points:.2f}", 15, anchor="rm", bold=True)
    if len(group.rows) == 1:
        names = lead.match.prototype.title
        texts = (f"{lead.match.similarity:.2f}", "x", f"{lead.weight:.2f}", "=", "")
        for x, text in _number_columns(*texts):
            canvas.text(x, middle, text, 15, SOFT if text in "x=" else INK, anchor="rm")
    else:
        canvas.text(right - 85, middle, f"{len(group.rows)} prototypes  =", 15, SOFT, anchor="rm")
        names = ", ".join(f"{row.match.prototype.id}: {row.points:.2f}" for row in group.rows)
    if lead.match.prototype.class_name != sheet.name:
        names += f" of {lead.match.prototype.class_name}"
    canvas.text(right, middle + 16, one_line(names, right - NUMBERS, 11), 11, SOFT, anchor="ra")


def _number_columns(*texts: str) -> list[tuple[float, str]]:
    """Return the texts with the right edges of their columns in the sum."""
    right = WIDTH - MARGIN
    return list(zip((right - 250, right - 215, right - 120, right - 85, right), texts, strict=True))


def _row_pictures(explanation: ScoredPicture, match: Match, colours: str) -> list[Image.Image]:
    side, prototype = PICTURE * SCALE, match.prototype
    own = fit(explanation.picture, side)
    source = read_picture(explanation.run, prototype.source)
    share = match.source_share or in_shares(prototype.source_box, *source.size)
    source = fit(source, side)
    return [
        draw_box(own, scaled(match.share, *own.size), SCALE),
        fit(cut_out(explanation.picture, match.share), side),
        fit(explanation.source_part(match), side),
        draw_box(source, scaled(share, *source.size), SCALE),
        overlay(own, match.map_HW, colours),
    ]
