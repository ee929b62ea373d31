"""What several processes must compute as one does, be it one or several that work at it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from likethat import distributed
from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.inference import memory_map, score_cache
from likethat.inference.feature_maps import keep_feature_maps
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import classify_images, score_images
from likethat.models.backbone import place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import create_protopnet
from likethat.runs.atomic_files import save_tensors, with_prefix
from likethat.training import choose
from likethat.training import project as project_module
from likethat.training.batches import FreshViews
from likethat.training.choose import start_from_baseline
from likethat.training.loop import batch_costs, gradient_step
from likethat.training.parallel import average_gradients, synchronise_norms
from likethat.training.parts import find_parts
from likethat.training.plan import set_mode, start_stage
from likethat.training.project import project
from likethat.training.state import RunState
from likethat.training.wrap_step import wrap_step

CLASSES = 3
BATCHES = torch.arange(42).view(6, 7).flip(1)  # seven pictures a step, so that slices differ in size


def make_state(config: Config) -> RunState:
    torch.manual_seed(0)
    model = place(create_protopnet(config.model, [4] * CLASSES), torch.device("cpu"))
    baseline = BaselineClassifier(model.backbone, CLASSES)
    baseline.backbone.idle = nn.Parameter(torch.ones(3))  # as some backbones have: no picture depends on it
    return RunState(model, baseline)


def make_images() -> Images:
    """Return each picture twice, so that the second process finds the same distances as the first."""
    generator = torch.Generator().manual_seed(1)
    pixel_NHW3 = torch.randint(256, (70, 64, 64, 3), generator=generator, dtype=torch.uint8)
    label_N = torch.arange(70) % CLASSES
    return Images(torch.cat([pixel_NHW3, pixel_NHW3]), torch.cat([label_N, label_N]), torch.device("cpu"))


def train(state: RunState, stage: str, images: Images, config: Config) -> dict[str, Tensor]:
    """Take steps of plain gradient descent, which does not blow up the last bit of a gradient as Adam does."""
    module = state.trained(stage)
    start_stage(state.model, state.baseline, stage, config.train)
    optimizer = torch.optim.SGD([value for value in module.parameters() if value.requires_grad], lr=0.05)
    set_mode(module, stage, len(images), config.train)

    def costs_of(*shown: Tensor) -> dict[str, Tensor]:
        return batch_costs(state, stage, config, *shown)

    cells = state.backbone.cells
    middle_Nm2 = None if state.parts is None else state.parts.middles(cells)
    source = FreshViews(images, config.augment, cells, middle_Nm2)
    take_step = wrap_step(gradient_step, average_gradients(module, costs_of), optimizer, source, print)
    found = {}
    for number, index_B in enumerate(BATCHES):
        for name, value in take_step(index_B, number).items():
            found[f"{name}{number}"] = value
    return found | with_prefix("module", module.state_dict())


def work(file: Path) -> dict[str, Tensor]:
    config = resolve("default", None, backbone="test_resnet", weights="none", latent_width="16", input_size="64")
    # Statistics are learned, and every picture has a piece of another. The first picture of a slice has no partner in
    # the locality cost, so that of several processes is another one.
    config = replace(
        config,
        train=replace(config.train, batch_norm_images=10, locality=0.0),
        augment=replace(config.augment, cutmix=1.0),
    )
    images, state = make_images(), make_state(config)
    model, baseline = state.protopnet, state.baseline
    assert baseline is not None
    is_last = distributed.rank() == distributed.world_size() - 1
    found = {
        "exact/least": torch.tensor(distributed.least_of_all(3 if is_last else 5)),
        "exact/score_NP": score_images(model, images),
        "exact/logits_NK": classify_images(baseline, images),
        "exact/validation_NK": classify_images(model, images),
        "exact/map_NCHW": keep_feature_maps(baseline.eval().backbone, images, torch.arange(len(images))).map_NCHW,
    }
    found |= with_prefix("exact/nearest", vars(nearest_patches(model, images, k=3)))
    found |= with_prefix("exact/projection", vars(project(model, images, ("a", "b", "c"))))
    found["exact/prototype_PDhw"] = model.prototype_layer.prototype_PDhw.detach().clone()
    share, memory_map.MEMORY_SHARE = memory_map.MEMORY_SHARE, 0.0  # scores go to a file
    with score_cache.cached_scores(model, images, None, file) as score_NP:
        found["exact/cached_NP"] = score_NP.clone()
    memory_map.MEMORY_SHARE = share
    whole = choose.MOST_BYTES, project_module.MOST_BYTES
    choose.MOST_BYTES, project_module.MOST_BYTES = 7_000, 2_500  # candidates of two classes at a time
    found |= with_prefix("exact/groups", vars(project(model, images, ("a", "b", "c"))))
    state.parts = find_parts(baseline.eval().backbone, images, 4)
    source = start_from_baseline(model, baseline, images, state.parts)
    found |= with_prefix("exact/embedded", vars(source)) | with_prefix("exact/parts", vars(state.parts))
    found["exact/embedded_PDhw"] = model.prototype_layer.prototype_PDhw.detach().clone()
    found["exact/scale_KP"] = model.last_layer.weight.detach().clone()
    choose.MOST_BYTES, project_module.MOST_BYTES = whole
    found |= with_prefix("exact/lda", vars(start_from_baseline(model, baseline, images, state.parts, "lda")))
    found["exact/lda_PDhw"] = model.prototype_layer.prototype_PDhw.detach().clone()
    state.projection = start_from_baseline(model, baseline, images, state.parts)
    state.make_teacher()
    found |= with_prefix("exact/source", vars(state.projection))
    found |= with_prefix("warm", train(state, "warm", images, config))
    found |= with_prefix("joint", train(state, "joint", images, config))
    state = make_state(config)
    assert state.baseline is not None
    state.protopnet.double()  # statistics of few pictures blow up rounding
    state.baseline.double()
    synchronise_norms(state.protopnet)
    return found | with_prefix("baseline", train(state, "baseline", images, config))


def save(file: Path) -> int:
    """In each of the processes; the main process saves what they have found."""
    with distributed.session():
        results = work(file.with_suffix(".scores"))
        if distributed.is_main_process():
            save_tensors(file, results)
    return 0
