"""Do similarity, box and prediction outlive JPEG and noise?

Definition (ours): the picture is stored as JPEG of quality 40, or gets the noise of Huang et al. 2023 (see
`stability`). For the three prototypes with most points: the overlap (intersection over union) of the boxes before and
after, the change of the similarity as a share of what it was, and whether the prediction stays.

Limits: JPEG is applied at the network's input size, which is harder than at the file's. One draw of noise a picture.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from likethat.data.loaders import to_unit
from likethat.data.reading.workers import map_in_threads
from likethat.explaining.draw.render import encode
from likethat.metrics.figure import MetricFigure
from likethat.metrics.response import Responses, respond
from likethat.metrics.sweep import Batch, Metric, Subject
from likethat.metrics.transformations import GROUP

QUALITY = 40


def through_jpeg(x_B3HW: Tensor) -> Tensor:
    """Return the pictures as they come out of JPEG files."""
    pixel_BHW3 = (x_B3HW * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()

    def coded(pixel_HW3: np.ndarray) -> np.ndarray:
        return np.array(Image.open(io.BytesIO(encode(Image.fromarray(pixel_HW3), "JPEG", quality=QUALITY))))

    coded_BHW3 = torch.from_numpy(np.stack(list(map_in_threads(coded, pixel_BHW3))))
    return to_unit(coded_BHW3.to(x_B3HW.device).permute(0, 3, 1, 2))


class Degradation(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.jpeg = Responses("JPEG", GROUP, "this project")
        self.noise = Responses("noise", GROUP, "this project")

    def collect(self, batch: Batch) -> None:
        if batch.perturbed:
            after = batch.read([through_jpeg(x_B3HW) for x_B3HW in batch.x])
            self.jpeg.add("JPEG", respond(batch, after))
            self.noise.add("noise", respond(batch, batch.noisy))

    def figures(self) -> list[MetricFigure]:
        note = self.subject.sample_note(self.subject.perturbed)
        return [*self.jpeg.figures(f"{note}, quality {QUALITY}"), *self.noise.figures(note)]
