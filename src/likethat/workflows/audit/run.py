"""What `likethat data audit` does: pictures by how much the evidence contradicts their label."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from likethat.config.settings import Config
from likethat.data.dataset import DataSet, Sample
from likethat.data.groups import group_numbers, group_of
from likethat.data.loaders import Images
from likethat.errors import UserError
from likethat.explaining.explanation import Explanation, Options, explain_batch
from likethat.inference.passes import classify_images, score_images
from likethat.inference.source_image import leave_source_out
from likethat.models.backbone import Backbone, configured_backbone, place
from likethat.models.protopnet import Output, ProtoPNet, logits_of_scores
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.classifier import Classifier, load
from likethat.runtime import seed_for
from likethat.workflows.audit.opinions import opinion_of_features, own_values, pooled_features, refitted_logits, scaled
from likethat.workflows.derived import GONE, read_images, source_images


@dataclass(frozen=True)
class Doubt:
    """A picture and what speaks against its label."""

    part: str  # "train" or "val"
    sample: Sample
    class_name: str  # as it is labelled
    suggested: str  # the likeliest class
    label_probability: float
    suggested_probability: float

    @property
    def path(self) -> str:
        return self.sample.path


@dataclass(frozen=True)
class Audit:
    """All training and validation pictures, those first whose label is contradicted most."""

    classifier: Classifier
    dataset: DataSet
    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]  # on what the judgement rests

    def explained(self, most: int) -> Iterator[Explanation]:
        """Yield the scoring sheets of the first ones: what decides between the two classes, without what prototypes
        that were cut from the picture itself, or from others of its group, would say."""
        for doubt in self.doubts[:most]:
            yield explain_without_itself(self.classifier, self.dataset, doubt)


def audit_run(run: Path, data: str | None, device: str, display: Display) -> Audit:
    """Judge the label of every training and validation picture of a run by evidence that it had no part in."""
    record = layout.read_record(run)
    if record.kind == layout.COMBINED:
        raise UserError(f"{run} is a combined run; audit the runs it was combined from.")
    classifier = load(run, device)
    network, config = classifier.networks[0], record.config
    with tempfile.TemporaryDirectory(prefix="likethat-audit-") as scratch:
        prepared = read_images(classifier, record, data, Path(scratch), display)
        dataset, (train, val) = prepared.dataset, (prepared.images[part] for part in ("train", "val"))
        label_N = torch.cat([train.label_N, val.label_N])
        backbone, note = backbone_before(network, config, classifier.device)
        with display.task("features of the images") as advance:
            parts = [pooled_features(backbone, images, advance) for images in (train, val)]
        group_N = torch.tensor(group_numbers([*dataset.train, *dataset.val]), device=classifier.device)
        log_NK = opinion_of_features(torch.cat(parts), label_N, group_N, len(classifier.classes))
        log_NK = _with_the_runs_own(log_NK, classifier, dataset, train, val, group_N, config)
    return Audit(classifier, dataset, _ranked(log_NK, label_N, dataset), note)


def backbone_before(network: ProtoPNet, config: Config, device: torch.device) -> tuple[Backbone, tuple[str, ...]]:
    """Return the backbone as it was before labels taught it anything, and what must be said about it."""
    if not has_learned(config):
        return network.backbone, ("The backbone was never trained on these labels, and judges them as it is.",)
    memorised = (
        "The network was trained on these labels, and there is no backbone from before: wrong labels that it has "
        "memorised are not found."
    )
    if config.model.weights == "none":
        return network.backbone, (memorised,)
    torch.manual_seed(seed_for(config.train.seed, "weights"))
    try:
        backbone = configured_backbone(config.model, config.model.weights)
    except UserError as error:
        return network.backbone, (f"{memorised} {error}",)
    note = (
        "The network was trained on these labels and has memorised its training pictures, so they are judged by the "
        "backbone as it was before; validation pictures by both."
    )
    return place(backbone, device).eval(), (note,)


def has_learned(config: Config) -> bool:
    """Return whether labels have changed the backbone."""
    settings = config.train
    return bool(
        settings.baseline_epochs or settings.from_baseline or settings.warm_epochs or sum(settings.joint_epochs)
    )


def _with_the_runs_own(
    log_NK: Tensor,
    classifier: Classifier,
    dataset: DataSet,
    train: Images,
    val: Images,
    group_N: Tensor,
    config: Config,
) -> Tensor:
    """Return the mean of these log probabilities and of those by the evidence of the run's own prototypes, wherever
    the network has not learned from the label."""
    network, first_val, mean_NK = classifier.networks[0], len(train), log_NK.clone()
    if len(val):
        mean_NK[first_val:] += scaled(classify_images(network, val), val.label_N)[1]
        mean_NK[first_val:] /= 2
    if not has_learned(config):
        image_P = torch.tensor(source_images(classifier.prototypes, dataset), device=classifier.device)
        source_P = torch.where(image_P == GONE, GONE, group_N[image_P])
        train_N = group_N[:first_val]
        fair_NP = leave_source_out(score_images(network, train), train_N[:, None], source_P, network.own_KP)
        class_P = network.prototype_layer.class_P
        logits_NK = refitted_logits(fair_NP, train.label_N, train_N, class_P, len(classifier.classes), config.train)
        mean_NK[:first_val] += scaled(logits_NK, train.label_N)[1]
        mean_NK[:first_val] /= 2
    return mean_NK


def _ranked(log_NK: Tensor, label_N: Tensor, dataset: DataSet) -> tuple[Doubt, ...]:
    """Return the pictures, those first whose label is least likely."""
    probability_NK = log_NK.softmax(1)
    own_N = own_values(probability_NK, label_N)
    best_N, guess_N = probability_NK.max(1)
    samples = [("train", sample) for sample in dataset.train] + [("val", sample) for sample in dataset.val]
    doubts = []
    for number in own_values(log_NK, label_N).argsort(stable=True).tolist():
        part, sample = samples[number]
        names = dataset.classes[sample.label], dataset.classes[int(guess_N[number])]
        doubts.append(Doubt(part, sample, *names, float(own_N[number]), float(best_N[number])))
    return tuple(doubts)


def explain_without_itself(classifier: Classifier, dataset: DataSet, doubt: Doubt) -> Explanation:
    """Explain a picture of the run's own data. Prototypes that were cut from it, or from others of its group, find
    themselves in it, which says nothing: they give no points."""
    prepared = classifier.prepare(dataset.root / doubt.sample.path, doubt.sample.box)
    group = group_of(doubt.sample)
    places = {(sample.path, sample.box) for sample in dataset.train if group_of(sample) == group}
    own = [p for p, prototype in enumerate(classifier.prototypes) if (prototype.path, prototype.crop_to) in places]
    (output,), (network,) = classifier.outputs([prepared]), classifier.networks
    without = _without(output, own, network.last_layer.weight)
    against = doubt.class_name
    if classifier.classes[int(without.logits_BK[0].argmax())] == doubt.class_name:
        against = doubt.suggested
    options = Options(top_classes=1, against=against)

    (explanation,) = explain_batch(classifier, [prepared], options, paths=[doubt.path], outputs=[without])
    return replace(explanation, verdict=None)  # it is no new picture, so nothing is promised about it


def _without(output: Output, own: Sequence[int], weight_KP: Tensor) -> Output:
    score_BP = output.score_BP.clone()
    score_BP[:, list(own)] = 0
    return replace(output, score_BP=score_BP, logits_BK=logits_of_scores(score_BP, weight_KP).detach())
