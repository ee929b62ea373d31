"""What several processes must compute as one does. Started alone or by torchrun; the first process saves its results.

python distributed_case.py OUT.safetensors
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from likethat import distributed
from likethat.config import Config, resolve
from likethat.data.loaders import Images
from likethat.inference import memory_map, score_cache
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import classify_images, score_images
from likethat.models.backbone import place
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import create_protopnet
from likethat.runs.atomic_files import save_tensors, with_prefix
from likethat.training import choose, steps
from likethat.training import project as project_module
from likethat.training.choose import start_from_classifier
from likethat.training.latent_width import feature_maps
from likethat.training.parallel import average_gradients, synchronise_norms
from likethat.training.phases import Step, set_mode, start_stage
from likethat.training.project import project
from likethat.training.state import Progress
from likethat.training.train_step import FreshViews, Source, TrainStep
from likethat.training.view_maps import cached_view_maps

CLASSES = 3
BATCHES = torch.arange(42).view(6, 7).flip(1)  # seven pictures a step, so that slices differ in size


memory_map.MEMORY_SHARE = 0.0  # scores and feature maps go to a file


def make_progress(config: Config) -> Progress:
    torch.manual_seed(0)
    model = place(create_protopnet(config.model, [4] * CLASSES), torch.device("cpu"))
    plain = PlainClassifier(model.backbone, CLASSES)
    plain.backbone.idle = nn.Parameter(torch.ones(3))  # as some backbones have: no picture depends on it
    return Progress(model, plain)


def make_images() -> Images:
    """Each picture twice, so that the second process finds the same distances as the first."""
    generator = torch.Generator().manual_seed(1)
    pixel_NHW3 = torch.randint(256, (70, 64, 64, 3), generator=generator, dtype=torch.uint8)
    label_N = torch.arange(70) % CLASSES
    return Images(torch.cat([pixel_NHW3, pixel_NHW3]), torch.cat([label_N, label_N]), torch.device("cpu"))


def train(
    progress: Progress, stage: str, images: Images, config: Config, source: Source | None = None
) -> dict[str, Tensor]:
    """Steps of plain gradient descent, which does not blow up the last bit of a gradient as Adam does."""
    step = Step(stage)
    module = progress.plain if stage == "classifier" else progress.model
    assert module is not None
    start_stage(progress.model, progress.plain.head if progress.plain else None, stage, config.train)
    optimizer = torch.optim.SGD([value for value in module.parameters() if value.requires_grad], lr=0.05)
    steps.begin_epoch(progress, step, images, config)
    set_mode(progress.model, stage, len(images), config.train)

    def costs_of(*shown: Tensor) -> dict[str, Tensor]:
        return steps.costs_of_step(progress, step, config, *shown)

    source = source or FreshViews(images, config.augment)
    take_step = TrainStep(optimizer, average_gradients(module, costs_of), source, print)
    found = {}
    for number, index_B in enumerate(BATCHES):
        for name, value in take_step(index_B, seed=number).items():
            found[f"{name}{number}"] = value
    return found | with_prefix("module", module.state_dict())


def work(file: Path) -> dict[str, Tensor]:
    config = resolve("default", None, backbone="test_resnet", weights="none", latent_width="16", input_size="64")
    # Statistics are learned, and every picture has a piece of another.
    config = replace(config, train=replace(config.train, norm_images=10), augment=replace(config.augment, cutmix=1.0))
    images, progress = make_images(), make_progress(config)
    assert progress.plain is not None
    found = {
        "exact/score_NP": score_images(progress.model, images),
        "exact/logits_NK": classify_images(progress.plain, images),
        "exact/validation_NK": classify_images(progress.model, images),
        "exact/map_NCHW": feature_maps(progress.plain, images, torch.arange(len(images))).pixel_NHW3,
    }
    found |= with_prefix("exact/nearest", vars(nearest_patches(progress.model, images, k=3)))
    found |= with_prefix("exact/projection", vars(project(progress.model, images, ("a", "b", "c"))))
    found["exact/prototype_PDhw"] = progress.model.prototype_layer.prototype_PDhw.detach().clone()
    with score_cache.cached_scores(progress.model, images, None, file) as score_NP:
        found["exact/cached_NP"] = score_NP.clone()
    whole = choose.MOST_BYTES, project_module.MOST_BYTES
    choose.MOST_BYTES, project_module.MOST_BYTES = 7_000, 2_500  # candidates of two classes at a time
    found |= with_prefix("exact/groups", vars(project(progress.model, images, ("a", "b", "c"))))
    source = start_from_classifier(progress.model, progress.plain, images, config.train.telling)
    found |= with_prefix("exact/embedded", vars(source))
    found["exact/embedded_PDhw"] = progress.model.prototype_layer.prototype_PDhw.detach().clone()
    found["exact/scale_KP"] = progress.model.last_layer.weight.detach().clone()
    choose.MOST_BYTES, project_module.MOST_BYTES = whole
    progress.projection = start_from_classifier(progress.model, progress.plain, images, config.train.telling)
    progress.make_teacher()
    found |= with_prefix("exact/source", vars(progress.projection))
    on_maps = replace(config, train=replace(config.train, warm_views=2))
    with cached_view_maps(progress.model.backbone, images, on_maps, file, distributed.barrier) as maps:
        found["exact/view_map_RHWC"] = maps.pixel_NHW3.clone()
        found |= with_prefix("warm", train(progress, "warm", images, on_maps, maps))
    found |= with_prefix("joint", train(progress, "joint", images, config))
    progress = make_progress(config)
    progress.model.double()  # statistics of few pictures blow up rounding
    assert progress.plain is not None
    progress.plain.double()
    synchronise_norms(progress.model)
    return found | with_prefix("classifier", train(progress, "classifier", images, config))


if __name__ == "__main__":
    with distributed.session():
        results = work(Path(sys.argv[1]).with_suffix(".scores"))
        if distributed.is_first():
            save_tensors(Path(sys.argv[1]), results)
