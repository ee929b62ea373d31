"""A finished run, loaded: the model, its classes, and where each prototype comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from PIL.Image import Image
from torch import Tensor

from likethat.data.decode import Box, View, read_image, to_input
from likethat.data.formats import stated_range
from likethat.data.loaders import to_unit
from likethat.data.reading.values import Range
from likethat.errors import UserError
from likethat.models.backbone import place
from likethat.models.protopnet import Output, ProtoPNet, create_protopnet, summed_logits
from likethat.runs import hub, layout
from likethat.runs.calibration import Calibration, Verdict, likeness_of, read_calibration
from likethat.runs.layout import RunRecord
from likethat.runs.notebook import card, note, ranking, shown, table
from likethat.runs.prototypes import Prototype, check_places, read_prototypes
from likethat.runtime import exact_arithmetic, resolve_device

BATCH = 32  # pictures that are predicted at a time
MOST_NAMES = 10  # of classes, in a notebook
PictureSource = str | Path | bytes | BinaryIO | Image

SAME_PATCH = 1e-3  # distance of a prototype to the patch that it is, after rounding, at most


@dataclass(frozen=True)
class Prediction:
    class_name: str
    probability: float
    probabilities: dict[str, float]
    verdict: Verdict | None = None  # of a run that was calibrated

    def to_dict(self) -> dict[str, Any]:
        document = asdict(replace(self, verdict=None))
        del document["verdict"]
        return {**document, "verdict": self.verdict.to_dict()} if self.verdict else document

    def _repr_html_(self) -> str:
        promise = note(self.verdict.sentence()) if self.verdict else ""
        return card(self.class_name, promise, ranking(self.probabilities))


@dataclass(frozen=True)
class PreparedPicture:
    """A picture ready for every member network: its bytes at that network's input size, and the way back."""

    image: Image  # upright
    pixels: tuple[Tensor, ...]  # 3HW uint8, one a member
    views: tuple[View, ...]
    hidden: tuple[Box, ...] = ()  # what was painted over, in shares of what the networks see


class Classifier:
    """Networks whose logits are summed (one, unless runs were combined), over the same classes."""

    def __init__(
        self,
        path: Path,
        classes: Sequence[str],
        members: Sequence[ProtoPNet],
        prototypes: Sequence[Prototype],
        calibration: Calibration | None = None,
        value_range: Range | None = None,
    ) -> None:
        self.path = path
        self.classes = tuple(classes)
        self.members = torch.nn.ModuleList(members).eval()
        self.prototypes = tuple(prototypes)
        self.calibration = calibration
        self.value_range = value_range  # as it was trained with, of pictures of more than 8 bits
        self.device = next(self.members.parameters()).device

    def __repr__(self) -> str:
        names = " + ".join(member.backbone.name for member in self.networks)
        return f"<likethat.Classifier {names}: {len(self.classes)} classes, {len(self.prototypes)} prototypes>"

    def _repr_html_(self) -> str:
        names = ", ".join(self.classes[:MOST_NAMES])
        more = len(self.classes) - MOST_NAMES
        sources = len({prototype.path for prototype in self.prototypes})
        rows = {
            "backbone": " + ".join(member.backbone.name for member in self.networks),
            "pictures": " + ".join("{} x {}".format(*member.backbone.input_size) for member in self.networks),
            "classes": f"{len(self.classes)}: {names}" + (f" and {more} more" if more > 0 else ""),
            "prototypes": f"{len(self.prototypes)} from {sources} training pictures",
            "calibrated on": f"{len(self.calibration.nonconformity)} pictures" if self.calibration else "none",
        }
        return card(str(self.path), table([(name, shown(value)) for name, value in rows.items()]))

    @property
    def networks(self) -> list[ProtoPNet]:
        return [member for member in self.members if isinstance(member, ProtoPNet)]

    @property
    def sees_windows(self) -> bool:
        """Say whether each box is all that was seen for its similarity."""
        return all(member.backbone.windows is not None for member in self.networks)

    @property
    def weight_KP(self) -> Tensor:
        """Return the connection of every prototype to every class, over all members."""
        return torch.cat([member.last_layer.weight.detach() for member in self.networks], 1)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model into a folder in the layout of the Hugging Face hub, with a model card."""
        return hub.save_pretrained(self.path, self.networks, Path(folder), overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str = "auto") -> Classifier:
        """Load the model that `save_pretrained` wrote into a folder, or one of the hub by its id."""
        return load(hub.find_pretrained(source), device)

    def prepare(self, source: PictureSource, crop_to: Box | None = None) -> PreparedPicture:
        image = read_image(Path(source) if isinstance(source, str) else source, value_range=self.value_range)
        inputs = [to_input(image, crop_to, member.backbone.input_size) for member in self.networks]
        pixels = tuple(torch.from_numpy(pixels).permute(2, 0, 1) for pixels, _ in inputs)
        return PreparedPicture(image, pixels, tuple(view for _, view in inputs))

    @torch.no_grad()
    def outputs(self, batch: Sequence[PreparedPicture]) -> list[Output]:
        """Return one `Output` a member, each over the whole batch."""
        stacked = [
            to_unit(torch.stack(pixels).to(self.device)) for pixels in zip(*(p.pixels for p in batch), strict=True)
        ]
        outputs = [member(x_B3HW) for member, x_B3HW in zip(self.networks, stacked, strict=True)]
        if not all(bool(output.logits_BK.isfinite().all()) for output in outputs):
            raise UserError(f"{self.path} gives points that are no numbers, so its weights are damaged; restore it.")
        return outputs

    def predict(self, image: PictureSource | Sequence[PictureSource], level: float | None = None) -> Any:
        """Predict the class of one picture (a path, bytes, an open file or a Pillow image), or of each in a list.

        `level` is that of the prediction sets of a calibrated run; if none is given, the largest of 0.8, 0.9 and 0.95
        that its validation images support.
        """
        if isinstance(image, Sequence) and not isinstance(image, str | bytes):
            return list(self.predict_all(image, level))
        return next(self.predict_all([image], level))

    def predict_all(self, images: Iterable[PictureSource], level: float | None = None) -> Iterator[Prediction]:
        prepared = map(self.prepare, images)
        while batch := list(islice(prepared, BATCH)):
            yield from self.predict_batch(batch, level)

    def predict_batch(self, batch: Sequence[PreparedPicture], level: float | None) -> Iterator[Prediction]:
        """Yield the classes of pictures that are prepared."""
        outputs = self.outputs(batch)
        logits_BK = summed_logits(outputs).cpu().double()
        score_BP = torch.cat([output.score_BP for output in outputs], 1).cpu().double()
        verdicts = self.verdicts(logits_BK, score_BP, level)
        for probability_K, verdict in zip(logits_BK.softmax(1).tolist(), verdicts, strict=True):
            by_name = dict(zip(self.classes, probability_K, strict=True))
            best = max(by_name, key=by_name.__getitem__)
            yield Prediction(best, by_name[best], by_name, verdict)

    def verdicts(self, logits_BK: Tensor, score_BP: Tensor, level: float | None = None) -> list[Verdict | None]:
        """Return what may be promised about each picture; nothing (None) where the run is not calibrated."""
        if self.calibration is None:
            if level is not None:
                raise UserError(
                    f"{self.path} is not calibrated, so it promises no level; run `likethat calibrate {self.path}`."
                )
            return [None] * len(logits_BK)
        remedy = self.calibration.remedy(level)
        level = self.calibration.usual_level if level is None else level
        informed = self.calibration.informs(level)
        verdicts: list[Verdict | None] = []
        similarity_B, nearest_B = score_BP.max(1)
        probability_BK, holds_B = logits_BK.softmax(1), self._holds_source(score_BP)
        # A picture that a prototype was cut from has its likeliest class at least.
        sets = self.calibration.likeliest_classes(probability_BK, level, holds_B.long())
        columns = (likeness_of(logits_BK), nearest_B, similarity_B, holds_B)
        for chosen, likeness, nearest, similarity, source in zip(
            sets, *(column.tolist() for column in columns), strict=True
        ):
            verdicts.append(
                Verdict(
                    level=level,
                    classes=tuple(self.classes[k] for k in chosen),
                    informed=informed,
                    likeness=likeness,
                    unlike=not source and self.calibration.is_unlike(likeness, level),
                    nearest=self.prototypes[nearest].id,
                    nearest_title=self.prototypes[nearest].title,
                    nearest_class=self.prototypes[nearest].class_name,
                    similarity=similarity,
                    remedy=remedy,
                )
            )
        return verdicts

    def _holds_source(self, score_BP: Tensor) -> Tensor:
        """Return whether each picture holds the very patch that some prototype is, and so cannot be unlike all."""
        layers = [member.prototype_layer for member in self.networks]
        same_P = [score_BP.new_full((len(layer.class_P),), SAME_PATCH) for layer in layers]
        least_P = [layer.similarity.of_distance(own_p) for layer, own_p in zip(layers, same_P, strict=True)]
        return (score_BP >= torch.cat(least_P)).any(1)


def load(run: str | Path, device: str = "auto") -> Classifier:
    """Load the model of a finished run folder. Nothing but tensors and JSON is read."""
    run = Path(run)
    record = layout.read_record(run)
    if record.kind == layout.BASELINE:
        raise UserError(
            f"{run} is a baseline without prototypes; only `likethat evaluate`, `compare` and `info` take it."
        )
    exact_arithmetic()
    members = [place(_load_network(run / folder, record), resolve_device(device)) for folder in record.member_folders()]
    prototypes = read_prototypes(run)
    for number, (folder, network) in enumerate(zip(record.member_folders(), members, strict=True)):
        check_places(run / folder, network, [own for own in prototypes if own.member == number])
    calibration = read_calibration(run)
    return Classifier(run, record.data.classes, members, prototypes, calibration, stated_range(record.config))


def _load_network(run: Path, whole: RunRecord) -> ProtoPNet:
    """Build a network of a run; what config.json says is compared with the file of weights before memory is taken."""
    record = layout.read_record(run)
    if record.kind != layout.PROTOPNET or record.data.classes != whole.data.classes:
        raise UserError(f"{run} is no network of the classes of its run; restore it from a copy.")
    settings, counts = record.config.model, list(record.prototypes_of_class)
    width, *window = layout.check_prototype_shape(run, sum(counts))
    if tuple(window) != settings.prototype_shape or (width != settings.latent_width and settings.add_on != "linear"):
        raise layout.does_not_fit(run)
    model = create_protopnet(settings, counts, weights="none")
    class_P = model.prototype_layer.class_P.clone()
    layout.load_weights(run, model, "train")
    if not torch.equal(class_P, model.prototype_layer.class_P):
        raise UserError(f"{run / layout.MODEL} gives prototypes to other classes than {run / layout.CONFIG} does.")
    return model
