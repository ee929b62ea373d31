"""Where a bird stands: backdrop, perch and light, drawn without knowing the species."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from likethat.data.synthetic.birds import Pose, draw_bird, lay_out
from likethat.data.synthetic.ink import (
    Array,
    BirdCanvas,
    Colour,
    Points,
    blur,
    fill,
    paint,
    planes,
    rotate,
    smooth,
    streaks,
    stroke,
)

BACKDROPS = ("sky", "foliage", "reeds", "snow", "sand", "dusk")
# Upper and lower colour of the blurred distance.
DISTANCE: dict[str, tuple[Colour, Colour]] = {
    "sky": ((150, 190, 222), (222, 232, 234)),
    "foliage": ((122, 152, 96), (70, 98, 60)),
    "reeds": ((206, 208, 184), (168, 160, 112)),
    "snow": ((196, 210, 224), (240, 244, 250)),
    "sand": ((196, 212, 216), (222, 202, 164)),
    "dusk": ((136, 142, 170), (238, 200, 164)),
}
BARK, LEAF, SNOW, SAND = (104, 84, 66), (98, 128, 62), (240, 244, 250), (216, 194, 152)


@dataclass(frozen=True)
class Scene:
    """Everything of a picture but the species."""

    pose: Pose = field(default_factory=Pose)
    backdrop: str = "sky"
    grounded: bool = False  # on the ground rather than on a branch
    light: tuple[float, float] = (-0.5, -0.87)  # towards the lamp
    brightness: float = 1.0
    warmth: float = 0.0  # positive is redder
    falloff: float = 0.0  # how much darker the side away from the lamp is
    seed: int = 0  # of leaves, bark and plumage


def sample_scene(rng: np.random.Generator) -> Scene:
    """Draw a pose, a place and a light at random."""
    backdrop = str(rng.choice(BACKDROPS))
    grounded = backdrop in ("snow", "sand") and rng.random() < 0.7
    pose = Pose(
        facing=int(rng.choice([-1, 1])),
        posture=rng.uniform(0.2, 0.75),
        head_tilt=rng.normal(0, 0.12),
        head_turn=rng.uniform(0.86, 1.0),
        tail_angle=rng.uniform(-0.3, 0.25),
        tail_spread=rng.uniform(0.02, 0.09),
        plump=rng.uniform(0.92, 1.1),
        leg=rng.uniform(0.22, 0.32),
        perch_slope=0.0 if grounded else rng.uniform(-0.2, 0.2),
        span=rng.uniform(0.74, 0.93),
        shift=(rng.uniform(0.1, 0.9), rng.uniform(0.2, 0.75)),
    )
    angle = rng.uniform(-1.0, 1.0)
    return Scene(
        pose=pose,
        backdrop=backdrop,
        grounded=grounded,
        light=(float(np.sin(angle)), float(-np.cos(angle))),
        brightness=rng.uniform(0.84, 1.1),
        warmth=rng.uniform(-0.06, 0.09),
        falloff=rng.uniform(0.0, 0.3),
        seed=int(rng.integers(2**32)),
    )


def draw_picture(colours: Mapping[str, Colour], scene: Scene, size: int) -> BirdCanvas:
    """Draw a bird of these part colours; return the picture and the masks of its visible parts."""
    rng = np.random.default_rng(scene.seed)
    layout = lay_out(scene.pose, size)
    feet = (layout.shapes["near foot"][0][0] + layout.shapes["far foot"][0][0]) / 2
    canvas = BirdCanvas(draw_distance(scene.backdrop, size, rng))
    if scene.grounded:
        draw_ground(canvas, scene, feet, layout.unit, rng)
    else:
        draw_branch(canvas, scene, feet, layout.unit, rng)
    draw_bird(canvas, layout, colours, scene.light, rng)
    return BirdCanvas(relight(canvas.rgb, scene, rng), canvas.visible)


def relight(rgb: Array, scene: Scene, rng: np.random.Generator) -> Array:
    size = rgb.shape[-1]
    y, x = np.mgrid[-0.5 : 0.5 : size * 1j, -0.5 : 0.5 : size * 1j].astype(np.float32)
    lamp = scene.brightness * (1 + scene.falloff * (x * scene.light[0] + y * scene.light[1]))
    grain = 1.5 * rng.standard_normal((size, size), np.float32)
    tint = np.array([1 + scene.warmth, 1, 1 - scene.warmth], np.float32)[:, None, None]
    return np.clip(rgb * tint * lamp + grain, 0, 255)


def draw_distance(backdrop: str, size: int, rng: np.random.Generator) -> Array:
    """Draw the far background, out of focus."""
    n = 72  # it is blurred, so few pixels do
    top, bottom = (np.array(c) + rng.normal(0, 9) + rng.normal(0, 3, 3) for c in DISTANCE[backdrop])
    ramp = np.linspace(0, 1, n)[:, None, None]
    base = np.broadcast_to(top + (bottom - top) * ramp, (n, n, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(base)
    draw = ImageDraw.Draw(image, "RGBA")

    def tone(spread: float, alpha: int) -> tuple[int, ...]:
        at = rng.random()
        colour = top + (bottom - top) * at + rng.normal(0, spread) + rng.normal(0, spread / 3, 3)
        return (*(int(c) for c in colour.clip(0, 255)), alpha)

    def disc(x: float, y: float, rx: float, ry: float, colour: tuple[int, ...]) -> None:
        draw.ellipse((x - rx, y - ry, x + rx, y + ry), fill=colour)

    if backdrop in ("reeds", "snow"):  # stems of reeds, trunks in a winter wood
        for _ in range(26 if backdrop == "reeds" else 7):
            x, lean = rng.uniform(0, n), rng.normal(0, 6)
            width = rng.integers(1, 4) if backdrop == "reeds" else rng.integers(2, 7)
            dark = tone(30, 170) if backdrop == "reeds" else (118, 116, 122, 120)
            draw.line((x, n, x + lean, rng.uniform(-n, n / 2)), fill=dark, width=int(width))
    if backdrop in ("sand", "dusk"):  # dunes, far hills
        for k in range(3):
            height = n * (0.5 + 0.15 * k) + rng.normal(0, 3)
            disc(rng.uniform(0, n), height + n, n * rng.uniform(0.9, 1.6), n, tone(12, 190))
    spots = {"sky": 5, "foliage": 60, "reeds": 12, "snow": 14, "sand": 4, "dusk": 12}[backdrop]
    for _ in range(spots):
        radius = rng.uniform(2, 9) if backdrop == "foliage" else rng.uniform(2, 6)
        x, y = rng.uniform(0, n, 2)
        if backdrop == "sky":
            disc(x, y, radius * 4, radius, (246, 248, 250, 130))
        else:
            disc(x, y, radius, radius, tone(26, 120))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(1.2, 2.6)))
    large = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(large, np.float32).transpose(2, 0, 1))


def draw_ground(canvas: BirdCanvas, scene: Scene, feet: Points, unit: float, rng: np.random.Generator) -> None:
    size = canvas.rgb.shape[-1]
    colour = SNOW if scene.backdrop == "snow" else SAND
    x = np.linspace(-0.1, 1.1, 9) * size
    crest = feet[1] - unit * (0.16 + 0.05 * rng.standard_normal(9))
    ridge = smooth(np.stack([x, crest], 1), closed=False)
    below = np.array([[1.1 * size, 1.2 * size], [-0.1 * size, 1.2 * size]])
    mask = fill(size, np.concatenate([ridge, below]))
    grains = rng.standard_normal((size, size), np.float32)
    lumps = blur(grains, 0.08 * unit) + 0.5 * blur(grains, 0.03 * unit)
    paint(canvas, blur(mask, 0.06 * unit), planes(colour) * (1.0 + 0.05 * lumps + 0.012 * grains))
    grass = []
    for _ in range(rng.integers(3, 9)):
        root = np.array([rng.uniform(0, size), feet[1] + rng.uniform(-0.1, 0.3) * unit])
        for _ in range(3):
            bend = rng.normal(0, 0.1) * unit
            blade = root + np.array([[0, 0], [bend / 3, -0.12 * unit], [bend, -rng.uniform(0.18, 0.3) * unit]])
            grass.append(stroke(smooth(blade, False), 0.022 * unit, 0.004 * unit))
    paint(canvas, 0.8 * fill(size, *grass), (150, 132, 84))
    turn = np.linspace(0, 2 * np.pi, 40)
    oval = np.stack([np.cos(turn) * 0.5, np.sin(turn) * 0.07], 1) * unit
    shadow = fill(size, feet + oval - [scene.light[0] * 0.3 * unit, -0.02 * unit])
    paint(canvas, 0.4 * blur(shadow, 0.05 * unit), (84, 86, 104))


def draw_branch(canvas: BirdCanvas, scene: Scene, feet: Points, unit: float, rng: np.random.Generator) -> None:
    size = canvas.rgb.shape[-1]
    slope = -np.tan(scene.pose.perch_slope) * scene.pose.facing
    thick = rng.uniform(0.11, 0.17) * unit
    x = np.linspace(-0.1, 1.1, 13) * size
    away = (x - feet[0]) / size
    y = feet[1] + 0.45 * thick + slope * (x - feet[0]) + rng.normal(0, 0.25) * size * away**2
    y += rng.normal(0, 0.02 * unit, 13) * np.minimum(1, np.abs(away) * 4)
    line = smooth(np.stack([x, y], 1), closed=False)
    for _ in range(rng.integers(1, 4)):
        draw_twig(canvas, line[rng.integers(len(line))], unit, scene.backdrop, rng)
    wood = fill(size, stroke(line, thick * rng.uniform(0.8, 1.2), thick * rng.uniform(0.8, 1.2)))
    grain = streaks(size, 8, rng)
    fall = np.gradient(-blur(wood, 0.6 * thick), axis=0) * thick
    paint(canvas, wood, planes(BARK) * (1 - 0.45 * fall + 0.1 * grain).clip(0.4, 1.6))
    if scene.backdrop == "snow":
        cover = fill(size, stroke(line - [0, 0.42 * thick], 0.3 * thick, 0.3 * thick))
        paint(canvas, cover, planes(SNOW) * (1 + 0.02 * grain))


def draw_twig(canvas: BirdCanvas, root: Points, unit: float, backdrop: str, rng: np.random.Generator) -> None:
    size = canvas.rgb.shape[-1]
    sideways = rng.choice([-1, 1]) * rng.uniform(0.4, 1.0)
    reach = rng.uniform(0.4, 0.9) * unit * np.array([sideways, rng.uniform(-1.0, 0.6)])
    bow = np.array([-reach[1], reach[0]]) * rng.normal(0, 0.15)
    twig = smooth(np.array([root, root + reach / 2 + bow, root + reach]), closed=False)
    paint(canvas, fill(size, stroke(twig, 0.045 * unit, 0.015 * unit)), (92, 74, 58))
    if backdrop == "snow":
        return
    leaf = np.array([(0.0, 0.0), (0.35, 0.16), (0.7, 0.12), (1.0, 0.0), (0.7, -0.12), (0.35, -0.16)])
    hue = np.array(LEAF) + rng.normal(0, 14, 3) + (rng.random() < 0.25) * np.array([70, 10, -20])
    blades = []
    for k in range(4, len(twig), 3):
        heading = np.arctan2(*reach[::-1]) + rng.choice([-1, 1]) * rng.uniform(0.4, 1.1)
        blades.append(twig[k] + rotate(leaf, heading) * rng.uniform(0.16, 0.28) * unit)
    for row, factor in ((blades[::2], 0.85), (blades[1::2], 1.15)):
        paint(canvas, fill(size, *(smooth(blade) for blade in row)), (factor * hue).astype(np.float32))
    ribs = fill(size, *(stroke(blade[[0, 3]], 0.014 * unit, 0.004 * unit) for blade in blades))
    paint(canvas, 0.5 * ribs, (0.6 * hue).astype(np.float32))
