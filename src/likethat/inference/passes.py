"""Passes over images with a model that does not move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from likethat.config.settings import Config
from likethat.data.cache import CHUNK, decode_chunk
from likethat.data.dataset import Sample
from likethat.data.loaders import Images, ViewedImages, hold, views_of
from likethat.distributed import gather_rows, gpu_memory, own_shard
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, logits_of_scores
from likethat.models.prototypes import PrototypeLayer, Similarity
from likethat.progress import Advance
from likethat.runtime import seed_for, send

EVAL_BATCH = 64
LARGE_GPU = 32e9  # bytes of memory
MORE_THERE = 4  # times as many: fewer would leave a fast GPU waiting to be told what to do
BLOCK = 2**22  # logits that are converted to float64 at a time

Batches = Iterator[tuple[Tensor, Tensor, Tensor]]  # numbers of the images, pictures, labels
LatentBatches = Iterable[tuple[Tensor, Tensor]]  # numbers of the images, latent maps
Head = tuple[PrototypeLayer, Tensor]  # prototypes and a last layer of theirs


class HasBatches(Protocol):
    """Images, or what a network has made of them."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]: ...


def mixed_precision(device: torch.device, similarity: Similarity | None = None) -> AbstractContextManager[object]:
    """Use bf16 where it pays (CUDA) and the similarity, if there is one, bears it. Only what learns from views uses it;
    all that must be exact runs in fp32."""
    bears = similarity is None or similarity.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=bears and device.type == "cuda")


def precision_for(images: Images, model: ProtoPNet) -> AbstractContextManager[object]:
    """Use mixed precision for views, which teach the last layer as they taught the layers before it; unaugmented
    pictures are exact."""
    is_view = isinstance(images, ViewedImages)
    return mixed_precision(images.device, model.prototype_layer.similarity) if is_view else nullcontext()


def eval_batch(device: torch.device) -> int:
    """Return how many pictures a pass looks at together."""
    is_large = device.type == "cuda" and gpu_memory(device) > LARGE_GPU
    return EVAL_BATCH * MORE_THERE if is_large else EVAL_BATCH


def batches_of(images: Images, advance: Advance | None = None) -> Batches:
    """Yield unaugmented pictures in order: index, pictures, labels."""
    return _batches(images, slice(0, len(images)), advance)


def own_batches_of(images: HasBatches, advance: Advance | None = None) -> Batches:
    """Yield the batches of this process's shard, where several share a pass."""
    return _batches(images, own_shard(len(images), eval_batch(images.device)), advance)


def _batches(images: HasBatches, part: slice, advance: Advance | None) -> Batches:
    size = eval_batch(images.device)
    for start in range(part.start, part.stop, size):
        index_B = torch.arange(start, min(start + size, part.stop))
        yield (index_B, *images.batch(index_B))
        if advance:
            advance(int(index_B[-1]) + 1 - part.start, part.stop - part.start)


def own_batches_of_files(
    root: Path,
    samples: Sequence[Sample],
    size_hw: tuple[int, int],
    device: torch.device,
    advance: Advance | None = None,
) -> Batches:
    """Yield the same of image files, decoded when they are needed, so that there may be any number of them."""
    part = own_shard(len(samples), eval_batch(device))
    for start in range(part.start, part.stop, CHUNK):
        chunk = tuple(samples[start : min(start + CHUNK, part.stop)])
        pixels = decode_chunk(root, chunk, size_hw).pixels
        for index_B, x_B3HW, label_B in batches_of(hold(pixels, chunk, device)):
            yield start + index_B, x_B3HW, label_B
            if advance:
                advance(start + int(index_B[-1]) + 1 - part.start, part.stop - part.start)


def last_layer_images(train: Images, config: Config) -> Images:
    """Return the images that the last layer learns from: views of every training image. The network has
    memorised the pictures themselves, so connections learned from them would be too sure of themselves."""
    seed = seed_for(config.train.seed, "last layer")
    return views_of(train, config.augment, seed, config.train.last_layer_views)


@torch.no_grad()
def score_images(model: ProtoPNet, images: Images, advance: Advance | None = None) -> Tensor:
    """Return the similarity scores of every image, N x P. Where there are many, use `cached_scores`."""
    model.eval()
    score_NP = torch.zeros(len(images), len(model.prototype_layer.class_P), device=images.device)
    for index_B, x_B3HW, _ in own_batches_of(images, advance):
        with precision_for(images, model):
            score_NP[send(index_B, images.device)] = scores_of(model, x_B3HW)
    return gather_rows(score_NP)


def scores_of(model: ProtoPNet, x_B3HW: Tensor) -> Tensor:
    """Return the similarity scores of some pictures, B x P."""
    return scores_by(model.prototype_layer, model.latent(x_B3HW))


def scores_by(layer: PrototypeLayer, z_BDHW: Tensor) -> Tensor:
    """Return the similarity scores of some latent maps, B x P, without holding all their distances in memory."""
    nearest = [maps.smallest() for _, maps in layer.in_blocks(z_BDHW)]
    return layer.similarity.of_distance(torch.cat(nearest, 1))


def classify_images(model: ProtoPNet | BaselineClassifier, images: Images, advance: Advance | None = None) -> Tensor:
    """Return the logits of every image, N x K."""
    return gather_logits(model, own_batches_of(images, advance), len(images), images.device)


@torch.no_grad()
def gather_logits(model: ProtoPNet | BaselineClassifier, batches: Batches, count: int, device: torch.device) -> Tensor:
    """Return the logits of `count` images, of which this process has these batches and others have theirs."""
    if isinstance(model, ProtoPNet):
        head = model.prototype_layer, model.last_layer.weight
        return logits_by([head], latents_of(model, batches), count, device)[0]
    model.eval()
    logits_NK = torch.zeros(count, model.head.out_features, device=device)
    for index_B, x_B3HW, _ in batches:
        logits_NK[send(index_B, device)] = model(x_B3HW).float()
    return gather_rows(logits_NK)


@torch.no_grad()
def latents_of(model: ProtoPNet, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the latent maps of pictures, batch by batch."""
    model.eval()
    for index_B, x_B3HW, _ in batches:
        yield index_B, model.latent(x_B3HW)


@torch.no_grad()
def logits_by(
    heads: Sequence[Head], latents: LatentBatches, count: int, device: torch.device, kept_NP: Tensor | None = None
) -> list[Tensor]:
    """Return what each of several heads makes of latent maps, from one pass and without keeping the scores; those of
    the last head's prototypes go into `kept_NP`, where it is given."""
    found = [torch.zeros(count, len(weight_KP), device=device) for _, weight_KP in heads]
    for index_B, z_BDHW in latents:
        here_B = send(index_B, device)
        score_of = {layer: scores_by(layer, z_BDHW) for layer, _ in heads}
        for logits_NK, (layer, weight_KP) in zip(found, heads, strict=True):
            logits_NK[here_B] = logits_of_scores(score_of[layer], weight_KP)
        if kept_NP is not None:
            kept_NP[here_B] = score_of[heads[-1][0]]
    if kept_NP is not None:
        gather_rows(kept_NP)
    return [gather_rows(logits_NK) for logits_NK in found]


@torch.no_grad()
def logits_of_kept(score_NP: Tensor, weight_KP: Tensor) -> Tensor:
    """Return the logits of images whose scores were kept, cut as images are, so that they are the same to the bit."""
    size = eval_batch(score_NP.device)
    return torch.cat([logits_of_scores(score_BP, weight_KP) for score_BP in score_NP.split(size)])


def groups_within(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yield groups of neighbours whose sizes add up to no more than `most`; one alone may have more."""
    start, size = 0, 0
    for number, own in enumerate(sizes):
        if number > start and size + own > most:
            yield range(start, number)
            start, size = number, 0
        size += own
    yield range(start, len(sizes))


def accuracy(logits_NK: Tensor, label_N: Tensor) -> float:
    return float((logits_NK.argmax(1) == label_N).cpu().double().mean())


def measure(logits_NK: Tensor, label_N: Tensor) -> dict[str, float]:
    rows = max(1, BLOCK // logits_NK.shape[1])
    entropy = sum(
        float(nn.functional.cross_entropy(logits_bK.cpu().double(), label_b.cpu(), reduction="sum"))
        for logits_bK, label_b in zip(logits_NK.split(rows), label_N.split(rows), strict=True)
    )
    mean = entropy / len(label_N) if len(label_N) else float("nan")
    return {"accuracy": accuracy(logits_NK, label_N), "cross_entropy": mean}
