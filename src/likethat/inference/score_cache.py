"""Scores of many images: in the device's memory or, where they are too large for it, in a file as float16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.inference.memory_map import fill_file, gone_afterwards, too_large
from likethat.inference.passes import own_batches_of, precision_for, score_images, scores_of
from likethat.inference.source_image import leave_source_out
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance

BLOCK = 2**24  # scores are worked on at a time
WHAT = "scores of the images"


@contextlib.contextmanager
def cached_scores(
    model: ProtoPNet, images: Images, source_P: Tensor | None, file: Path, advance: Advance | None = None
) -> Iterator[Tensor]:
    """Provide the similarity scores of every image, N x P, for the last layer to learn from. With `source_P` (the
    image each prototype was cut from) no prototype judges its own image. `file` is gone afterwards."""
    with gone_afterwards(file):
        yield cache_scores(model, images, source_P, file, advance)


def cache_scores(
    model: ProtoPNet, images: Images, source_P: Tensor | None, file: Path, advance: Advance | None = None
) -> Tensor:
    """Return the scores in memory or, where they would take too much of it, in `file`, which processes fill together.
    Rounding to float16 changes a score by a two-thousandth of itself at most; the solver takes it block by block."""
    count, prototypes = len(images), len(model.prototype_layer.class_P)
    if too_large(4 * count * prototypes, images.device):
        return fill_file(file, (count, prototypes), WHAT, _own_rows(model, images, source_P, advance))
    score_NP = score_images(model, images, advance)
    if source_P is not None:
        rows = max(1, BLOCK // prototypes)
        for row_b, score_bP in zip(torch.arange(count).split(rows), score_NP.split(rows), strict=True):
            score_bP.copy_(leave_source_out(score_bP, _images_of(images, row_b), source_P, model.own_KP))
    return score_NP


@torch.no_grad()
def _own_rows(
    model: ProtoPNet, images: Images, source_P: Tensor | None, advance: Advance | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of this process's shard."""
    model.eval()
    for index_B, x_B3HW, _ in own_batches_of(images, advance):
        with precision_for(images, model):
            score_BP = scores_of(model, x_B3HW)
        if source_P is not None:
            score_BP = leave_source_out(score_BP, _images_of(images, index_B), source_P, model.own_KP)
        yield int(index_B[0]), score_BP


def _images_of(images: Images, row_B: Tensor) -> Tensor:
    """Return the number of the one image in each row, B x 1, on the device."""
    return images.image_of(row_B).to(images.device)[:, None]
