"""What is computed on a GPU is what a CPU computes: choosing, projection, last layer, and the verbs on a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.gpu import CUDA, DEFAULT_ON_GPU, ON_GPU, make_birds_for_gpu
from helpers.runs import likethat
from helpers.tiny import tiny_model

from likethat import explain, load
from likethat.data.loaders import Images
from likethat.inference import feature_maps
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import score_images
from likethat.models.backbone import moved, place
from likethat.models.baseline import BaselineClassifier
from likethat.runtime import exact_arithmetic
from likethat.training.choose import start_from_baseline
from likethat.training.last_layer import solve_last_layer
from likethat.training.parts import find_parts
from likethat.training.project import project

pytestmark = ON_GPU

CLASSES = ("a", "b", "c")
CPU = torch.device("cpu")
# Noise is drawn where the pictures are, and two devices draw otherwise.
DRAWN_ON_THE_DEVICE = ("noise", "attack", "stability", "random start")


def make_images(device: torch.device) -> Images:
    """Stripes, so that patches differ more than rounding does."""
    generator = torch.Generator().manual_seed(0)
    coarse_N = torch.rand(24, 3, 12, 12, generator=generator)
    pixel_NHW3 = torch.nn.functional.interpolate(coarse_N, size=96).mul(255).byte().permute(0, 2, 3, 1).contiguous()
    return Images(pixel_NHW3.to(device), (torch.arange(24) % len(CLASSES)).to(device), device)


def on_both(**options: object) -> list[tuple]:
    """The same network with the same pictures, on either device."""
    exact_arithmetic()
    found = []
    for device in (CPU, CUDA):
        torch.manual_seed(0)
        model = place(tiny_model([4] * len(CLASSES), **options).eval(), device)
        found.append((model, make_images(device)))
    return found


def test_a_shifted_picture_has_one_gradient() -> None:
    """To the bit, each time: padding by torch's "replicate" adds up in any order there."""
    x_B3HW = torch.rand(8, 3, 224, 224, device=CUDA, requires_grad=True)
    weight_B3HW = torch.rand_like(x_B3HW)
    first, *others = (torch.autograd.grad((moved(x_B3HW, 7) * weight_B3HW).sum(), x_B3HW)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("similarity", ["log", "cosine"])
def test_projection_scores_and_nearest_patches(similarity: str) -> None:
    both = on_both(similarity=similarity)
    cpu, gpu = (project(model, images, CLASSES) for model, images in both)
    for name in ("image_P", "row_P", "column_P"):
        assert torch.equal(getattr(gpu, name).cpu(), getattr(cpu, name)), name
    torch.testing.assert_close(gpu.moved_P.cpu(), cpu.moved_P, rtol=1e-4, atol=1e-5)
    vectors = [model.prototype_layer.vectors().detach().cpu() for model, _ in both]
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-4, atol=1e-5)
    # A prototype lies on one of the patches, where the logarithm blows rounding up.
    scores = [score_images(model, images).cpu() for model, images in both]
    torch.testing.assert_close(scores[1], scores[0], rtol=0.02, atol=0.02)
    near = [nearest_patches(model, images, k=2) for model, images in both]
    assert torch.equal(near[1].image_Pk.cpu(), near[0].image_Pk)
    torch.testing.assert_close(near[1].distance_Pk.cpu(), near[0].distance_Pk, rtol=1e-3, atol=1e-4)


def test_rough_projection_takes_exact_patches_that_are_nearly_nearest() -> None:
    """It compares patches in TF32, whose products are good to a thousandth."""
    exact, rough = on_both(similarity="cosine")[1], on_both(similarity="cosine")[1]
    before_PD = exact[0].prototype_layer.vectors().clone()
    nearest = project(*exact, CLASSES)
    found = project(*rough, CLASSES, is_rough=True)
    model, images = rough
    with torch.no_grad():
        patch_NDHW = model.prototype_layer.patches(model.latent(images.batch(torch.arange(len(images)))[0]))
    vector_PD = model.prototype_layer.vectors()
    torch.testing.assert_close(
        vector_PD, patch_NDHW[found.image_P, :, found.row_P, found.column_P], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(found.moved_P, (vector_PD - before_PD).norm(dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.moved_P.sum(), nearest.moved_P.sum(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("add_on_start", ["pca", "lda"])
def test_prototypes_are_chosen_alike(add_on_start: str) -> None:
    found = []
    for model, images in on_both(add_on="linear", similarity="cosine"):
        torch.manual_seed(1)
        baseline = BaselineClassifier(model.backbone, len(CLASSES))
        parts = find_parts(model.backbone, images, 4)
        source = start_from_baseline(model, baseline.to(images.device), images, parts, add_on_start)
        found.append((source, model))
    (cpu, cpu_model), (gpu, gpu_model) = found
    assert torch.equal(gpu.image_P.cpu(), cpu.image_P)
    assert torch.equal(gpu.row_P.cpu(), cpu.row_P)
    assert torch.equal(gpu.column_P.cpu(), cpu.column_P)
    torch.testing.assert_close(gpu_model.last_layer.weight.cpu(), cpu_model.last_layer.weight)


@pytest.mark.parametrize("add_on_start", ["pca", "lda"])
def test_maps_on_the_gpu_are_those_in_the_cpus_memory(add_on_start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and so are the parts and prototypes that are found among them."""
    found = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(feature_maps, "GPU_SHARE", share)
        model, images = on_both(add_on="linear", similarity="cosine")[1]
        torch.manual_seed(1)
        baseline = BaselineClassifier(model.backbone, len(CLASSES)).to(CUDA)
        maps = feature_maps.keep_feature_maps(model.backbone, images, torch.arange(len(images)))
        assert maps.map_NCHW.device == (CUDA if share else CPU)
        chosen, _ = maps.batch(torch.arange(3, 17))
        parts = find_parts(model.backbone, maps, 4)
        source = start_from_baseline(model, baseline, maps, parts, add_on_start)
        tensors = [chosen, parts.place_Nm, source.image_P, source.row_P, model.prototype_layer.prototype_PDhw]
        found.append([*tensors, maps.select(torch.arange(24, device=CUDA) < 9).map_NCHW.to(CUDA)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_last_layers_are_solved_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    class_P, label_N = torch.arange(12) // 4, torch.arange(60) % 3
    own_NP = (label_N[:, None] == class_P[None]).float()
    score_NP = own_NP * 0.5 + torch.rand(60, 12, generator=generator)
    cpu, gpu = (
        solve_last_layer(score_NP.to(device), label_N.to(device), class_P.to(device), 3, lam=1e-3, ridge=1e-4)
        for device in (CPU, CUDA)
    )
    assert max(cpu.kkt_residual, gpu.kkt_residual) <= 1e-5
    assert gpu.objective == pytest.approx(cpu.objective, rel=1e-5)
    assert torch.equal(gpu.weight_KP.cpu() == 0, cpu.weight_KP == 0)
    torch.testing.assert_close(gpu.weight_KP.cpu(), cpu.weight_KP, rtol=0.02, atol=0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on the GPU."""
    folder = tmp_path_factory.mktemp("run")
    likethat("train", make_birds_for_gpu(folder / "birds"), "--out", folder / "run", *DEFAULT_ON_GPU)
    return folder / "run"


def documents(*command: object) -> list[dict]:
    """What a command prints on either device."""
    return [json.loads(likethat(*command, "--json", "--device", device).stdout) for device in ("cpu", "cuda")]


def test_verification_passes_on_both(run: Path) -> None:
    for document in documents("verify", run):
        assert document["passed"]
        assert document["prototypes"] == 9
        assert document["max_error"] < 1e-5


def test_evaluation_and_metrics(run: Path) -> None:
    cpu, gpu = documents("evaluate", run, "--interpretability")
    assert gpu["evaluation"]["accuracy"] == cpu["evaluation"]["accuracy"]
    assert gpu["evaluation"]["cross_entropy"] == pytest.approx(cpu["evaluation"]["cross_entropy"], rel=1e-4)
    values = [
        {
            figure["name"]: figure["value"]
            for figure in document["figures"]
            if not any(word in figure["name"] for word in DRAWN_ON_THE_DEVICE)
        }
        for document in (cpu, gpu)
    ]
    assert len(values[0]) > 30
    different = {
        name: (value, values[1][name])
        for name, value in values[0].items()
        if (value is None) != (values[1][name] is None)
        or (value is not None and values[1][name] != pytest.approx(value, rel=0.02, abs=0.02))
    }
    assert different == {}


def test_explanations(run: Path) -> None:
    picture = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    sheets = [explain(load(run, device), picture).to_dict() for device in ("cpu", "cuda")]
    cpu, gpu = (list(numbers_in(sheet)) for sheet in sheets)
    assert len(cpu) > 50
    assert [place for place, _ in gpu] == [place for place, _ in cpu]
    assert [value for _, value in gpu] == pytest.approx([value for _, value in cpu], rel=1e-2, abs=2e-2)


def numbers_in(value: object, place: str = "") -> list[tuple[str, float]]:
    """Every number of a document, with where it stands."""
    if isinstance(value, dict):
        return [found for name, inner in value.items() for found in numbers_in(inner, f"{place}/{name}")]
    if isinstance(value, list | tuple):
        return [found for number, inner in enumerate(value) for found in numbers_in(inner, f"{place}/{number}")]
    return [(place, float(value))] if isinstance(value, int | float) else []
