"""Scores of many images: in the device's memory or, where they are too large for it, in a file as float16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import any_process, barrier, is_first, local_world, world
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import check_disk, open_to_fill, physical_memory
from likethat.training.engine import own_batches_of, score_images, scores_of
from likethat.training.losses import leave_source_out

MEMORY_SHARE = 0.25  # of the device's memory that the scores may take
BLOCK = 2**24  # of them are worked on at a time


@contextlib.contextmanager
def cached_scores(
    model: ProtoPNet, images: Images, source_P: Tensor | None, file: Path, advance: Advance | None = None
) -> Iterator[Tensor]:
    """The similarity scores of every image, N x P, for the last layer to learn from. With `source_P` (the image each
    prototype was cut from) no prototype judges its own image. `file` is gone afterwards."""
    try:
        yield cache_scores(model, images, source_P, file, advance)
        barrier()  # every process has done with it
    finally:
        if is_first():
            _remove(file)


def cache_scores(
    model: ProtoPNet, images: Images, source_P: Tensor | None, file: Path, advance: Advance | None = None
) -> Tensor:
    """`file` is made where the scores would take too much memory; processes fill it together. Rounding to float16
    changes a score by a two-thousandth of itself at most; the solver takes it block by block."""
    count, prototypes = len(images), len(model.prototype_layer.class_P)
    if not any_process(4 * count * prototypes > MEMORY_SHARE * _memory(images.device)):
        score_NP = score_images(model, images, advance)
        if source_P is not None:
            rows = max(1, BLOCK // prototypes)
            for image_b, score_bP in zip(torch.arange(count).split(rows), score_NP.split(rows), strict=True):
                score_bP.copy_(_fair(model, score_bP, image_b, source_P))
        return score_NP
    if is_first():
        make_file(file, count, prototypes)
    barrier()
    _fill(file, model, images, source_P, advance)
    barrier()
    score_NP = map_file(file, count, prototypes)
    if world() == 1:
        _remove(file)  # the memory stays mapped, and nothing is left behind by a process that is killed
    return score_NP


def make_file(file: Path, count: int, prototypes: int) -> None:
    """Of float16 zeros."""
    file.parent.mkdir(parents=True, exist_ok=True)
    check_disk(file.parent, 2 * count * prototypes, "scores of the images")
    with file.open("wb") as made:
        made.truncate(2 * count * prototypes)


def map_file(file: Path, count: int, prototypes: int) -> Tensor:
    flat = torch.from_file(str(file), shared=True, size=count * prototypes, dtype=torch.float16)
    return flat.view(count, prototypes)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # Windows removes no file that is mapped
        file.unlink()


@torch.no_grad()
def _fill(file: Path, model: ProtoPNet, images: Images, source_P: Tensor | None, advance: Advance | None) -> None:
    model.eval()
    with open_to_fill(file) as filled:
        for index_B, x_B3HW, _ in own_batches_of(images, advance):
            score_BP = scores_of(model, x_B3HW)
            if source_P is not None:
                score_BP = _fair(model, score_BP, index_B, source_P)
            filled.seek(int(index_B[0]) * 2 * score_BP.shape[1])
            filled.write(score_BP.cpu().half().numpy().tobytes())


def _fair(model: ProtoPNet, score_BP: Tensor, image_B: Tensor, source_P: Tensor) -> Tensor:
    return leave_source_out(score_BP, image_B.to(score_BP.device)[:, None], source_P, model.own_KP)


def _memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else physical_memory() // local_world()
