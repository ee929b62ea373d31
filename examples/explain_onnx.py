"""As `likethat explain --json`, from an exported model alone: python explain_onnx.py MODEL.onnx PICTURE"""

import json
import math
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

TOP_CLASSES, NEAREST, ROUNDING, HOW = 3, 10, 4e-6, {"attribution": "upsampling"}


def cubic(size: int, cells: int) -> np.ndarray:
    """size x cells: bicubic interpolation of a line of cells is a product with it."""
    matrix = np.zeros((size, cells))
    for i in range(size):
        place = (i + 0.5) * cells / size - 0.5
        for cell in range(math.floor(place) - 1, math.floor(place) + 3):
            x, inside = abs(place - cell), min(max(cell, 0), cells - 1)
            matrix[i, inside] += 1.25 * x**3 - 2.25 * x**2 + 1 if x <= 1 else -0.75 * x**3 + 3.75 * x**2 - 6 * x + 3
    return matrix


def box_of(map_HW: np.ndarray, size: tuple[int, int], picture: Image.Image, model: dict) -> list[float]:
    """Return the best window, or else around the most active pixels of the map, in pixels of the upright picture."""
    if model["windows"]:
        stride, place = model["windows"][1], np.unravel_index(map_HW.argmax(), map_HW.shape)
        y, x = (range(p * stride, s - (n - 1 - p) * stride) for p, s, n in zip(place, size, map_HW.shape, strict=True))
    else:
        map_HW = map_HW - map_HW.min()
        pixels = cubic(size[0], map_HW.shape[0]) @ map_HW @ cubic(size[1], map_HW.shape[1]).T
        reaching = pixels.size - math.ceil((pixels.size - 1) * model["percentile"] / 100)
        active = pixels >= np.partition(pixels.flatten(), -reaching)[-reaching] - ROUNDING * map_HW.max()
        lines = zip((active.any(1), active.any(0)), model["margin"], size, strict=True)
        y, x = (range(max(0, a.argmax() - m), min(s, s - a[::-1].argmax() + m)) for a, m, s in lines)
    scale = np.array(picture.size * 2) / (size[::-1] * 2)
    return (np.array([x[0], y[0], x[-1] + 1, y[-1] + 1]) * scale).tolist()


def explain(session: onnxruntime.InferenceSession, path: str) -> dict[str, object]:
    model = json.loads(session.get_modelmeta().custom_metadata_map["likethat"])
    size, picture = model["preprocessing"]["size"], ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    small = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR), np.float32)
    outputs = session.run(["logits", "scores", "maps"], {"pictures": small.transpose(2, 0, 1)[None] / np.float32(255)})
    logits, scores, maps = (values[0].astype(float) for values in outputs)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits))

    def match(p: int) -> dict[str, object]:
        facts, box = model["prototypes"][p], box_of(maps[p], size, picture, model)
        head = {"prototype": facts["id"], "name": facts["name"], "similarity": scores[p], "box": box, **HOW}
        return {**head, "source": {key: facts[key] for key in ("path", "class", "box")}}

    classes = []
    for k in np.argsort(-logits, kind="stable")[:TOP_CLASSES]:
        rows = [{**match(p), "weight": weight, "points": scores[p] * weight} for p, weight in model["connections"][k]]
        rows.sort(key=lambda row: (-row["points"], row["prototype"]))
        classes.append({"name": model["classes"][k], "logit": logits[k], "probability": probabilities[k], "rows": rows})
    nearest = [match(p) for p in np.argsort(-scores, kind="stable")[:NEAREST]]
    return {"path": path, "predicted": classes[0]["name"], **HOW, "classes": classes, "nearest": nearest}


if __name__ == "__main__":
    print(json.dumps(explain(onnxruntime.InferenceSession(sys.argv[1]), sys.argv[2]), indent=1))
