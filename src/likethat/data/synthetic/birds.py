"""Draws one songbird in side view, part by part.

Shapes are written in body lengths, x towards the beak and y up, then posed and laid on the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

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
    scallops,
    smooth,
    streaks,
    stroke,
)

PARTS = ("crown", "beak", "throat", "wing bars", "belly", "tail", "legs")

# Plumage shared by all species, so that only the parts tell them apart.
MANTLE, BREAST, CHEEK = (126, 113, 98), (200, 189, 168), (160, 148, 130)
WING, FEATHER_EDGE, WING_SHADOW = (70, 64, 62), (158, 142, 120), (40, 34, 34)
EYE_RING, IRIS, GLINT, LORES = (226, 218, 200), (30, 20, 16), (255, 255, 250), (58, 50, 46)

Shapes = dict[str, list[Points]]
Frame = Callable[..., Points]  # takes points of the body or head and poses them


@dataclass(frozen=True)
class Pose:
    """How a bird stands, in radians and body lengths; the defaults are the plate of a field guide."""

    facing: int = 1  # 1 looks right, -1 left
    posture: float = 0.5  # slope of the back
    head_tilt: float = 0.0
    head_turn: float = 1.0  # foreshortening of the head, 1 in profile
    tail_angle: float = 0.0
    tail_spread: float = 0.03  # angle between neighbouring feathers
    plump: float = 1.0
    leg: float = 0.27
    perch_slope: float = 0.0
    span: float = 0.86  # longest side of the bird as a fraction of the image
    shift: tuple[float, float] = (0.5, 0.5)  # where in the free space left and right, above and below


@dataclass(frozen=True)
class Layout:
    """The outlines of a posed bird in pixels, and how many pixels a body length has."""

    pose: Pose
    shapes: Shapes
    unit: float


def anatomy(pose: Pose) -> Shapes:
    """Return the outlines of a posed bird by name, facing right, in body lengths with y up."""
    neck = rotate(np.array([0.37, 0.27 * pose.plump]), 0.7 * pose.posture)  # the head follows the back only partly

    def body(*points: tuple[float, float]) -> Points:
        return rotate(np.array(points) * [1, pose.plump], pose.posture)

    def head(*points: tuple[float, float]) -> Points:
        return neck + rotate(np.array(points) * [pose.head_turn, 1], pose.head_tilt)

    return {**trunk(body, head), **face(head), **wing(body), **tail(body, pose), **legs(body, pose)}


def trunk(body: Frame, head: Frame) -> Shapes:
    """Return the silhouette and its colour patches, which reach beyond it and are clipped by it."""
    skull = head((0.15, -0.12), (0.205, -0.02), (0.175, 0.09), (0.06, 0.165), (-0.08, 0.15), (-0.185, 0.03))
    back = body((0.10, 0.27), (-0.12, 0.24), (-0.38, 0.12), (-0.56, 0.02), (-0.53, -0.06), (-0.36, -0.17))
    front = body((-0.12, -0.29), (0.12, -0.325), (0.33, -0.24), (0.46, -0.06))
    bib = head((-0.09, -0.12), (0.03, -0.07), (0.14, -0.045), (0.26, -0.03))
    collar = 0.3 * skull[:1] + 0.7 * front[-1:] + [[0.2, 0.0], [0.0, -0.08], [-0.16, -0.02]]
    breast = body((0.36, 0.16), (0.22, 0.0), (-0.1, -0.08), (-0.45, -0.04), (-0.6, -0.2), (0.0, -0.5), (0.6, -0.3))
    belly = body((0.37, -0.07), (0.2, -0.09), (-0.1, -0.08), (-0.42, -0.07), (-0.58, -0.16), (0.0, -0.5), (0.5, -0.35))
    return {
        "silhouette": [smooth(np.concatenate([skull, back, front]))],
        "throat": [smooth(np.concatenate([bib, collar]))],
        "breast": [smooth(np.concatenate([breast, body((0.65, 0.12))]))],
        "belly": [smooth(np.concatenate([belly, body((0.48, -0.14))]))],
    }


def face(head: Frame) -> Shapes:
    brow = head((0.26, 0.055), (0.16, 0.075), (0.05, 0.08), (-0.08, 0.045), (-0.17, -0.04), (-0.26, -0.06))
    above = head((-0.24, 0.2), (0.0, 0.3), (0.24, 0.2))
    cheek = head((0.15, 0.0), (0.02, 0.04), (-0.12, 0.01), (-0.13, -0.07), (-0.03, -0.10), (0.1, -0.04))
    lores = head((0.21, 0.005), (0.08, 0.028), (-0.04, 0.03), (-0.14, 0.0))
    upper = head((0.16, 0.055), (0.24, 0.05), (0.33, 0.018), (0.40, -0.03), (0.29, -0.018), (0.16, -0.01))
    lower = head((0.16, 0.0), (0.29, -0.012), (0.37, -0.022), (0.29, -0.055), (0.16, -0.068))
    return {
        "crown": [smooth(np.concatenate([brow, above]))],
        "cheek": [smooth(cheek)],
        "lores": [stroke(smooth(lores, closed=False), 0.03, 0.012)],
        "upper mandible": [smooth(upper)],
        "lower mandible": [smooth(lower)],
        "eye": [head((0.075, 0.03))],
    }


def wing(body: Frame) -> Shapes:
    upper = smooth(body((-0.02, 0.20), (-0.28, 0.13), (-0.48, 0.05), (-0.70, -0.03)), closed=False)
    lower = smooth(body((-0.07, -0.13), (-0.28, -0.10), (-0.5, -0.07), (-0.70, -0.065)), closed=False)
    bend = body((0.29, 0.07), (0.17, 0.205)), body((0.13, -0.15), (0.27, -0.06))
    shoulder = body((0.4, 0.12), (0.2, 0.3), (0.155, 0.16), (0.15, 0.03), (0.15, -0.2), (0.4, -0.1))
    median = body((0.15, 0.175), (0.135, 0.09), (0.12, 0.0), (0.125, -0.12))
    greater = body((-0.03, 0.165), (-0.065, 0.07), (-0.08, -0.02), (-0.06, -0.115))
    rows = [body((x + 0.06, 0.15), (x, 0.06), (x, -0.05), (x + 0.03, -0.12)) for x in (0.22, 0.18, 0.035)]
    quills = [((1 - w) * upper + w * lower)[:-2] for w in np.linspace(0.12, 0.92, 8)]
    return {
        "wing": [smooth(np.concatenate([bend[0], upper[::6], lower[::-6], bend[1]]))],
        "shoulder": [smooth(shoulder)],
        "coverts": [scallops(row, count=5, depth=0.02) for row in rows],
        "quills": [stroke(quill, 0.018, 0.008) for quill in quills],
        "wing bars": [scallops(bar, count=5, depth=0.07) for bar in (median, greater)],
    }


def tail(body: Frame, pose: Pose) -> Shapes:
    root = body((-0.45, 0.02))
    vane = np.array([(0, 0.05), (-0.3, 0.055), (-0.6, 0.07), (-0.68, 0.04), (-0.67, -0.03), (-0.3, -0.045), (0, -0.04)])
    feathers = []
    for k in (-2, -1, 0, 1, 2):
        angle = pose.posture + pose.tail_angle + k * pose.tail_spread
        feathers.append(smooth(root + rotate(vane * [1 - 0.02 * abs(k), 1], angle)))
    return {"tail": feathers}


def legs(body: Frame, pose: Pose) -> Shapes:
    shapes: Shapes = {}
    slope = np.tan(pose.perch_slope)
    ground = body((-0.03, -0.27))[0, 1] - pose.leg
    for name, hip_x in (("far", 0.03), ("near", -0.10)):
        hip = body((hip_x, -0.25))[0]
        foot = np.array([hip[0] + 0.04, ground + slope * (hip[0] + 0.04)])
        ankle = (hip + foot) / 2 + [-0.055, 0.03]
        knee = (hip + ankle) / 2
        limb = [stroke(smooth(np.array([hip, ankle, foot]), closed=False), 0.05, 0.042)]
        for dx, dy in ((0.15, -0.02), (0.12, -0.05), (-0.10, -0.03)):
            toe = foot + np.array([[0, 0.012], [dx / 2, 0.022 + slope * dx / 2], [dx, dy + slope * dx]])
            limb.append(stroke(smooth(toe, closed=False), 0.042, 0.02))
        shapes[f"{name} leg"] = limb
        half = np.array([0.035, 0])
        shapes[f"{name} thigh"] = [smooth(np.array([hip - [0.09, -0.05], hip + 0.05, knee + half, knee - half]))]
        shapes[f"{name} foot"] = [foot[None]]
    return shapes


def lay_out(pose: Pose, size: int) -> Layout:
    """Scale and place a posed bird so that all of it is inside the image."""
    shapes = anatomy(pose)
    outer = ("silhouette", "upper mandible", "wing", "tail", "near leg", "far leg")
    extent = np.concatenate([outline for name in outer for outline in shapes[name]]) * [pose.facing, -1]
    low, high = extent.min(0), extent.max(0)
    unit = pose.span * size / (high - low).max()
    corner = (size - (high - low) * unit) * pose.shift - low * unit
    placed = {name: [o * [pose.facing, -1] * unit + corner for o in outlines] for name, outlines in shapes.items()}
    return Layout(pose, placed, float(unit))


def draw_bird(
    canvas: BirdCanvas,
    layout: Layout,
    colours: Mapping[str, Colour],
    light: tuple[float, float],
    rng: np.random.Generator,
) -> None:
    """Paint the bird over the canvas with a colour for each of PARTS; light points to the lamp, (0, -1) overhead."""
    size, shapes, unit, pose = canvas.rgb.shape[-1], layout.shapes, layout.unit, layout.pose
    silhouette, wing = fill(size, *shapes["silhouette"]), fill(size, *shapes["wing"])
    grain = Image.fromarray(streaks(size, 4, rng)).rotate(np.degrees(pose.posture) * pose.facing)
    barbs = np.asarray(grain, np.float32)
    # Blurred masks serve as height: slopes that face the lamp are bright. Beak, tail and legs stay out of it, so that
    # their colours change no other pixel.
    height = blur(silhouette, 0.16 * unit) + 0.5 * blur(silhouette, 0.45 * unit) + 0.22 * blur(wing, 0.07 * unit)
    fall_y, fall_x = np.gradient(-height)
    relief = (fall_x * light[0] + fall_y * light[1]) * unit
    shade = np.clip(1.02 + 0.11 * relief, 0.76, 1.2) * (1 + 0.09 * barbs)

    def tone(colour: Colour, factor: float = 1.0) -> Array:
        return planes(colour) * (factor * shade)

    def patch(name: str, softness: float = 0.03) -> Array:
        soft = blur(fill(size, *shapes[name]), softness * unit).clip(0, 1)
        frayed = soft + 0.6 * soft * (1 - soft) * barbs  # at the edge only: no stray feathers elsewhere
        return np.clip((frayed - 0.5) * 2.2 + 0.5, 0, 1) * silhouette

    draw_tail(canvas, layout, colours["tail"], barbs)
    for side, factor in (("far", 0.78), ("near", 1.0)):
        limb = fill(size, *shapes[f"{side} leg"])
        edge = np.gradient(blur(limb, 0.03 * unit), axis=1) * np.sign(light[0])
        paint(canvas, limb, planes(colours["legs"]) * (factor - 0.5 * edge), "legs")
        paint(canvas, fill(size, *shapes[f"{side} thigh"]), tone(BREAST, 0.85 * factor), "plumage")

    paint(canvas, silhouette, tone(MANTLE), "plumage")
    paint(canvas, patch("breast", 0.08), tone(BREAST), "plumage")
    paint(canvas, patch("belly", 0.05), tone(colours["belly"]), "belly")
    paint(canvas, patch("cheek", 0.05), tone(CHEEK), "plumage")
    paint(canvas, patch("throat"), tone(colours["throat"]), "throat")
    paint(canvas, patch("crown"), tone(colours["crown"]), "crown")
    paint(canvas, 0.85 * patch("lores"), tone(LORES), "plumage")

    beside = np.clip(blur(wing, 0.08 * unit) - wing, 0, 1) * silhouette
    paint(canvas, 0.45 * beside, tone(WING_SHADOW), "plumage")
    paint(canvas, wing, tone(WING), "plumage")
    paint(canvas, 0.85 * wing * patch("shoulder", 0.06), tone(MANTLE, 0.85), "plumage")
    paint(canvas, 0.6 * wing * patch("coverts", 0.01), tone(FEATHER_EDGE), "plumage")
    paint(canvas, 0.75 * wing * fill(size, *shapes["quills"]), tone(FEATHER_EDGE), "plumage")
    paint(canvas, wing * fill(size, *shapes["wing bars"]), tone(colours["wing bars"]), "wing bars")
    draw_beak(canvas, layout, colours["beak"])
    draw_eye(canvas, layout, light)


def draw_tail(canvas: BirdCanvas, layout: Layout, colour: Colour, barbs: Array) -> None:
    for k, feather in enumerate(layout.shapes["tail"]):
        vane = fill(canvas.rgb.shape[-1], feather)
        edge = 1 - np.clip(blur(vane, 0.03 * layout.unit) * 2 - 1, 0, 1)
        paint(canvas, vane, planes(colour) * ((0.8 + 0.06 * k) * (1 + 0.05 * barbs) * (1 - 0.38 * edge)), "tail")


def draw_beak(canvas: BirdCanvas, layout: Layout, colour: Colour) -> None:
    size = canvas.rgb.shape[-1]
    upper = fill(size, *layout.shapes["upper mandible"])
    ridge = np.gradient(blur(upper, 0.05 * layout.unit), axis=0) * 0.1 * layout.unit
    paint(canvas, fill(size, *layout.shapes["lower mandible"]), planes(colour) * 0.78, "beak")
    paint(canvas, upper, planes(colour) * (1 + ridge).clip(0.75, 1.35), "beak")


def draw_eye(canvas: BirdCanvas, layout: Layout, light: tuple[float, float]) -> None:
    size, centre = canvas.rgb.shape[-1], layout.shapes["eye"][0]
    turn = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], 1) * layout.unit
    glint = centre + np.array([0.3 * light[0], light[1]]) * 0.016 * layout.unit
    paint(canvas, fill(size, centre + 0.047 * circle), EYE_RING, "eye")
    paint(canvas, fill(size, centre + 0.036 * circle), IRIS, "eye")
    paint(canvas, fill(size, glint + 0.013 * circle), GLINT, "eye")
