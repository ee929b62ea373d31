"""Scores of many images: in the device's memory or, where they are too large for it, in a file as float16."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import any_process, join, local_world
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import check_disk, physical_memory
from likethat.training.engine import own_batches_of, score_images
from likethat.training.losses import leave_source_out

MEMORY_SHARE = 0.25  # of the device's memory that the scores may take


@contextlib.contextmanager
def cached_scores(
    model: ProtoPNet, images: Images, source_P: Tensor | None, file: Path, advance: Advance | None = None
) -> Iterator[Tensor]:
    """The similarity scores of every image, N x P, for the last layer to learn from. With `source_P` (the image each
    prototype was cut from) no prototype judges its own image.

    `file` is made where they would take too much memory, and is gone afterwards. Rounding to float16 changes a score by
    a two-thousandth of itself at most; the solver takes it block by block.
    """
    count, prototypes = len(images), len(model.prototype_layer.class_P)
    if not any_process(4 * count * prototypes > MEMORY_SHARE * _memory(images.device)):
        score_NP = score_images(model, images, advance)
        yield score_NP if source_P is None else _fair(model, score_NP, torch.arange(count), source_P)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    check_disk(file.parent, 2 * count * prototypes, "scores of the images")
    file = file.with_name(f"{file.name}.{os.getpid()}")  # processes that share a run have one each
    try:
        flat = torch.from_file(str(file), shared=True, size=count * prototypes, dtype=torch.float16)
        _remove(file)  # the memory stays mapped, and nothing is left behind by a process that is killed
        score_NP = flat.view(count, prototypes)
        _fill(score_NP, model, images, source_P, advance)
        yield score_NP
    finally:
        _remove(file)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # Windows removes no file that is mapped
        file.unlink()


@torch.no_grad()
def _fill(score_NP: Tensor, model: ProtoPNet, images: Images, source_P: Tensor | None, advance: Advance | None) -> None:
    model.eval()
    layer = model.prototype_layer
    for index_B, x_B3HW, _ in own_batches_of(images, advance):
        blocks = [distance_BpHW.flatten(2).amin(2) for _, distance_BpHW in layer.in_blocks(model.latent(x_B3HW))]
        score_BP = layer.similarity.of_distance(torch.cat(blocks, 1))
        if source_P is not None:
            score_BP = _fair(model, score_BP, index_B, source_P)
        score_NP[index_B] = score_BP.cpu().half()
    join(score_NP)


def _fair(model: ProtoPNet, score_BP: Tensor, image_B: Tensor, source_P: Tensor) -> Tensor:
    return leave_source_out(score_BP, image_B.to(score_BP.device)[:, None], source_P, model.own_KP)


def _memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else physical_memory() // local_world()
