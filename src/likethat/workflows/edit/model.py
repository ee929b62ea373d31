"""The model behind an editor: cached latent maps, and the last layer solved for any set of prototypes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.data.dataset import DataSet, fingerprint
from likethat.data.folder_kinds import CHECKPOINTS
from likethat.data.loaders import image_weights, to_unit
from likethat.errors import UserError
from likethat.explaining.explanation import class_number
from likethat.explaining.gallery import draw_prototypes
from likethat.inference.latents import Latents, cache_latents, score_latents
from likethat.inference.passes import last_layer_images, measure
from likethat.models.protopnet import ProtoPNet, logits_of_scores
from likethat.models.prototypes import PrototypeLayer
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.calibration import fit_calibration
from likethat.runs.classifier import Classifier, PreparedPicture, Prototype, load
from likethat.runs.layout import RunRecord
from likethat.training.candidates import Candidate, Patch, find_candidates
from likethat.training.last_layer import of_views
from likethat.training.project import Projection
from likethat.training.pruning.prune import CachedScores, refit_last_layer
from likethat.workflows.derived import read_images, rebuild, source_images
from likethat.workflows.edit.history import Edit
from likethat.workflows.objects import object_cells
from likethat.workflows.run_setup import PreparedRun


@dataclass(frozen=True, eq=False)
class Column:
    """A prototype that is or was in the model: its vector, and the scores it gives to every image."""

    prototype: Prototype
    patch: Patch
    vector_D: Tensor
    unprojected_D: Tensor
    score_N: dict[str, Tensor]  # of the 'views' and 'val'


@dataclass(frozen=True, eq=False)
class State:
    """The model after some edits."""

    columns: tuple[Column, ...]  # class by class; prototypes keep the numbers they had when the run was opened
    weight_KP: Tensor
    val: dict[str, float]
    kkt_residual: float | None = None  # None while the run's own last layer is in place
    edit: Edit | None = None  # that led here


@dataclass(frozen=True)
class Workshop:
    """A run with the latent maps of its training images, of the views that the last layer learns from, and of its
    validation images. Nothing in it changes."""

    original: Classifier
    record: RunRecord
    dataset: DataSet
    sha256: dict[str, str]
    latents: dict[str, Latents]  # 'train', 'views' and 'val'
    scratch: tempfile.TemporaryDirectory[str]  # for pictures of new prototypes
    on_NHW: Tensor | None = None  # cells of the training images that prototypes may be taken from, where not from all

    def candidates(self, network: ProtoPNet, number: int, taken: set[Patch], count: int) -> tuple[Candidate, ...]:
        """Return patches that could take the place of a prototype of the network."""
        return find_candidates(network, number, self.latents["train"], taken, count, self.on_NHW)

    def start(self) -> State:
        """Return the state of the run as it is."""
        network = self.original.networks[0]
        layer, prototypes = network.prototype_layer, self.original.prototypes
        scores = self._scores_by(layer)
        columns = tuple(
            Column(
                prototype,
                Patch(image, prototype.row, prototype.column),
                layer.prototype_PDhw[p].detach().flatten(),
                layer.unprojected_PDhw[p].flatten(),
                {part: score_NP[:, p] for part, score_NP in scores.items()},
            )
            for p, (prototype, image) in enumerate(
                zip(prototypes, source_images(prototypes, self.dataset), strict=True)
            )
        )
        weight_KP = network.last_layer.weight.detach()
        return State(columns, weight_KP, self._measure(columns, weight_KP))

    def solve(self, columns: tuple[Column, ...]) -> State:
        """Return the state with the last layer that is optimal for these prototypes, found from the scores alone."""
        settings, label_N = self.record.config.train, self.latents["views"].label_N
        source_P = torch.tensor([column.patch.image for column in columns], device=label_N.device)
        scores = CachedScores(
            _scores(columns, "views"),
            label_N,
            self._classes(columns),
            len(self.original.classes),
            source_P if settings.tie else None,  # as in training: tied prototypes do not judge their own images
            len(self.dataset.train),
            weight_N=of_views(
                image_weights(self.dataset.train, balance=settings.balance), len(label_N) // len(self.dataset.train)
            ),
        )
        solution = refit_last_layer(scores, None, settings)
        return State(columns, solution.weight_KP, self._measure(columns, solution.weight_KP), solution.kkt_residual)

    def cut(self, patch: Patch, old: Prototype) -> Column:
        """Cut a training patch as a prototype in the place of `old`, with its pictures in the scratch folder."""
        network, sample, classes = self.original.networks[0], self.dataset.train[patch.image], self.original.classes
        layer = network.prototype_layer
        z_1DHW = self.latents["train"].of_images(torch.tensor([patch.image]))
        vector_D = layer.patches(z_1DHW)[0, :, patch.row, patch.column]
        alone = layer.with_prototypes(vector_D[None], torch.tensor([old.label], device=self.original.device))
        model = rebuild(network, self.record.config.model, alone, vector_D.new_zeros(len(classes), 1))
        zero_P = torch.zeros(1, dtype=torch.long)
        place = Projection(zero_P, zero_P + patch.row, zero_P + patch.column, torch.zeros(1))
        folder = Path(tempfile.mkdtemp(dir=self.scratch.name))
        (drawn,) = draw_prototypes(folder, model, place, [sample], self.dataset.root, self.sha256, classes)
        prototype = replace(drawn, id=old.id, crop=str(folder / drawn.crop), source=str(folder / drawn.source))
        scores = {part: score_N1[:, 0] for part, score_N1 in self._scores_by(alone).items()}
        return Column(prototype, patch, vector_D, vector_D, scores)

    def _scores_by(self, layer: PrototypeLayer) -> dict[str, Tensor]:
        return {part: score_latents(layer, self.latents[part]) for part in ("views", "val")}

    def classifier(self, state: State) -> Classifier:
        """Return a classifier that shares everything before the prototypes with the run's own."""
        network, columns = self.original.networks[0], state.columns
        layer = network.prototype_layer.with_prototypes(
            torch.stack([column.vector_D for column in columns]),
            self._classes(columns),
            torch.stack([column.unprojected_D for column in columns]),
        )
        built = rebuild(network, self.record.config.model, layer, state.weight_KP)
        prototypes = [column.prototype for column in columns]
        val_NK = self.validation_logits(columns, state.weight_KP)
        calibration = fit_calibration(val_NK, self.latents["val"].label_N) if len(val_NK) else None
        return Classifier(
            self.original.path, self.original.classes, [built], prototypes, calibration, self.original.value_range
        )

    def _measure(self, columns: Sequence[Column], weight_KP: Tensor) -> dict[str, float]:
        return measure(self.validation_logits(columns, weight_KP), self.latents["val"].label_N)

    def validation_logits(self, columns: Sequence[Column], weight_KP: Tensor) -> Tensor:
        return logits_of_scores(_scores(columns, "val"), weight_KP)

    def _classes(self, columns: Sequence[Column]) -> Tensor:
        return torch.tensor([column.prototype.label for column in columns], device=self.original.device)


def _scores(columns: Sequence[Column], part: str) -> Tensor:
    return torch.stack([column.score_N[part] for column in columns], 1)


def open_workshop(
    run: Path, data: str | None, device: str, display: Display, withdrawn: Set[str] = frozenset()
) -> Workshop:
    """Read the run's images again but the withdrawn ones, make sure that they are the same, and keep what edits need of
    them."""
    record = layout.read_record(run)
    if record.kind == layout.COMBINED:
        raise UserError(f"{run} is a combined run; edit the runs it was combined from, and combine them again.")
    classifier = load(run, device)
    scratch = tempfile.TemporaryDirectory(prefix="likethat-edit-")
    try:
        folder = Path(scratch.name)
        prepared = read_images(classifier, record, data, folder, display, withdrawn)
        record = record_without(record, prepared, withdrawn)
        train, latents = prepared.images["train"], {}
        parts = {"train": train, "views": last_layer_images(train, record.config), "val": prepared.images["val"]}
        for part, images in parts.items():
            with display.task(f"latent maps ({part})") as advance:
                latents[part] = cache_latents(classifier.networks[0], images, folder / f"{part}.bin", advance)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        on_NHW = None
        if record.config.data.on_object:
            on_NHW = object_cells(prepared.dataset, classifier.networks[0].backbone.cells)
        return Workshop(classifier, record, prepared.dataset, dict(prepared.sha256), latents, scratch, on_NHW)
    except BaseException:
        scratch.cleanup()
        raise


def record_without(record: RunRecord, prepared: PreparedRun, withdrawn: Set[str]) -> RunRecord:
    """Return the record of a run that knows these images alone."""
    if not withdrawn:
        return record
    counts = {part: len(images) for part, images in prepared.images.items()}
    data = replace(
        record.data,
        counts=counts,
        skipped=tuple(sorted({*record.data.skipped, *withdrawn})),
        fingerprint=fingerprint(prepared.dataset, prepared.sha256),
    )
    return replace(record, data=data)


@torch.no_grad()
def effect_of_edits(
    before: Classifier, after: Classifier, picture: PreparedPicture, class_name: str | None
) -> dict[str, Any]:
    """Compare two models that differ in their prototypes on one picture: logits and probabilities of all classes, and
    the points that each prototype gives to one class (unless it is named, the one that `after` predicts), most changed
    first."""
    x_13HW = to_unit(picture.pixels[0][None].to(before.device))
    z_1DHW = before.networks[0].latent(x_13HW)
    models, classes = {"before": before, "after": after}, before.classes
    outputs = {when: model.networks[0].head(z_1DHW) for when, model in models.items()}
    predicted = {when: classes[int(output.logits_BK[0].argmax())] for when, output in outputs.items()}
    label = class_number(classes, class_name or predicted["after"])
    document: dict[str, Any] = {"class": classes[label]}
    points: dict[int, dict[str, Any]] = {}
    for when, model in models.items():
        logits_K, score_P = outputs[when].logits_BK[0].cpu().double(), outputs[when].score_BP[0].cpu().double()
        document[when] = {
            "predicted": predicted[when],
            "logits": dict(zip(classes, logits_K.tolist(), strict=True)),
            "probabilities": dict(zip(classes, logits_K.softmax(0).tolist(), strict=True)),
        }
        given_P = (score_P * model.weight_KP[label].cpu().double()).tolist()
        for prototype, given in zip(model.prototypes, given_P, strict=True):
            facts = {"prototype": prototype.id, "name": prototype.name, "class": prototype.class_name, when: given}
            points.setdefault(prototype.id, {"before": 0.0, "after": 0.0}).update(facts)
    return {**document, "points": sorted(points.values(), key=lambda row: -abs(row["after"] - row["before"]))}
