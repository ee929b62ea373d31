"""A classifier for people who have arrays and labels: scikit-learn's conventions, without needing scikit-learn."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from likethat.config.presets import resolve
from likethat.config.settings import options as known_options
from likethat.data.decode import read_image
from likethat.data.folder import EXTENSIONS
from likethat.data.formats import stated_range
from likethat.data.reading.values import Range
from likethat.data.reading.workers import map_in_threads
from likethat.errors import UserError
from likethat.explaining.explanation import Explanation, explain
from likethat.progress import Display
from likethat.runs.classifier import Classifier, PictureSource
from likethat.workflows.train import train

# Training holds images out to choose by (validation) and to report on (test). Who calls `fit` has test images of
# his own, so one image of each class is enough here.
TEST_FRACTION = 0.001


class ProtoPNetClassifier:
    """fit, predict, predict_proba, score and explain. X is an array of pictures (uint8: N, height, width, 3), or a list
    of paths, Pillow images or arrays.

    `options` are those of `likethat train`, such as backbone="resnet34" or seed=1. After `fit`, `classes_` are the
    labels, and `classifier_` is the model. It lives in a temporary folder: `classifier_.save_pretrained(FOLDER)` keeps
    it. A fitted estimator cannot be pickled.
    """

    _estimator_type = "classifier"  # for scikit-learn before 1.6

    def __init__(self, preset: str = "default", device: str = "auto", verbose: bool = False, **options: Any) -> None:
        self.preset, self.device, self.verbose = preset, device, verbose
        self.options = options

    def __repr__(self) -> str:
        given = {"preset": self.preset, **self.options}
        return f"ProtoPNetClassifier({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"preset": self.preset, "device": self.device, "verbose": self.verbose, **self.options}

    def set_params(self, **params: Any) -> ProtoPNetClassifier:
        for name, value in params.items():
            if name in ("preset", "device", "verbose"):
                setattr(self, name, value)
            elif name in known_options():
                self.options = {**self.options, name: value}
            else:
                raise UserError(f"There is no parameter called '{name}'; `likethat train --help` lists them.")
        return self

    def __sklearn_tags__(self) -> Any:
        """Return the tags that scikit-learn asks for; it is installed then."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        pictures = InputTags(two_d_array=False, three_d_array=True, string=True)
        return Tags("classifier", TargetTags(required=True), classifier_tags=ClassifierTags(), input_tags=pictures)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classifier_")

    def __getstate__(self) -> dict[str, Any]:
        if self.__sklearn_is_fitted__():
            raise UserError(
                "A fitted model is not pickled; keep it with classifier_.save_pretrained(FOLDER) and load it with "
                "likethat.Classifier.from_pretrained(FOLDER)."
            )
        return vars(self).copy()

    def fit(self, X: Any, y: Any) -> ProtoPNetClassifier:
        """Train a model as `likethat train` does; a part of the images is held out to choose by."""
        pictures, labels = as_pictures(X), np.asarray(y)
        if labels.shape != (len(pictures),):
            raise UserError(f"There are {len(pictures)} pictures and labels of shape {labels.shape}; give one each.")
        classes, number_N = np.unique(labels, return_inverse=True)
        names = class_names(classes)
        folder = Path(tempfile.mkdtemp(prefix="likethat-fit-"))
        try:
            about_values = {name: value for name, value in self.options.items() if name == "value_range"}
            values = stated_range(resolve(**about_values))
            _write_images(folder / "images" / "train", pictures, [names[k] for k in number_N.tolist()], values)
            settings = {"preset": self.preset, "device": self.device, "test_fraction": TEST_FRACTION, **self.options}
            classifier = train(folder / "images", folder / "run", display=Display(quiet=not self.verbose), **settings)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(classifier, shutil.rmtree, folder, ignore_errors=True)
        self.classes_, self.classifier_ = classes, classifier
        self._column_K = [classifier.classes.index(name) for name in names]
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return a row for each picture, a column for each of `classes_`."""
        rows = [list(found.probabilities.values()) for found in self._fitted().predict_all(as_pictures(X))]
        return np.array(rows).reshape(-1, len(self.classes_))[:, self._column_K]

    def predict(self, X: Any) -> np.ndarray:
        best_N = self.predict_proba(X).argmax(1)
        found: np.ndarray = self.classes_[best_N]
        return found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy."""
        return float(np.average(self.predict(X) == np.asarray(y), weights=sample_weight))

    def explain(self, X: Any, **how: Any) -> list[Explanation]:
        """Explain why each picture gets its class; `how` is passed to `likethat.explain`."""
        classifier = self._fitted()
        return [explain(classifier, picture, **how) for picture in as_pictures(X)]

    def _fitted(self) -> Classifier:
        if not self.__sklearn_is_fitted__():
            raise UserError("The classifier has not been fitted; call fit(X, y) first.")
        return self.classifier_


def as_pictures(X: Any) -> list[PictureSource]:
    """Return the pictures in a form that `Classifier.predict` takes, one entry a picture."""
    if isinstance(X, str | bytes | Path | Image.Image):
        raise UserError("Pictures come as a list or an array, also where there is only one.")
    if isinstance(X, np.ndarray) and X.dtype.kind not in "OUS":
        if X.ndim not in (3, 4):
            raise UserError(f"An array of pictures has the shape N, height, width, 3, and this one has {X.shape}.")
        return [_from_array(picture) for picture in X]
    return [_from_array(picture) if isinstance(picture, np.ndarray) else picture for picture in X]


def _from_array(picture: np.ndarray) -> Image.Image:
    if picture.dtype != np.uint8:
        raise UserError(f"Pictures are arrays of bytes (uint8 from 0 to 255), and this one is of {picture.dtype}.")
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[:, :, 0]
    if picture.ndim != 2 and not (picture.ndim == 3 and picture.shape[2] in (3, 4)):
        raise UserError(f"A picture has the shape height, width, 3, and this one has {picture.shape}.")
    return Image.fromarray(picture)


def class_names(classes: Iterable[Any]) -> list[str]:
    """Return the labels as names of folders; names that a folder cannot have are changed as little as possible."""
    names = []
    for label in classes:
        name = str(label).replace("/", "∕").replace("\0", " ")
        names.append(f"_{name}" if not name or name.startswith(".") else name)
    if len(set(names)) < len(names):
        raise UserError("Two labels have the same name; give the classes different ones.")
    return names


def _write_images(
    folder: Path, pictures: Sequence[PictureSource], names: Sequence[str], value_range: Range | None
) -> None:
    """Write an image folder, files numbered as the pictures are: links to those that are files, the others as PNG."""

    def write(numbered: tuple[int, tuple[PictureSource, str]]) -> None:
        number, (picture, name) = numbered
        source = Path(picture).resolve() if isinstance(picture, str | Path) else picture
        if isinstance(source, Path) and source.suffix.lower() in EXTENSIONS and source.is_file():
            _link(source, folder / name / f"{number:06d}{source.suffix}")
        else:
            called = str(source) if isinstance(source, Path) else f"picture {number}"
            image = read_image(source, name=called, value_range=value_range)
            image.save(folder / name / f"{number:06d}.png", compress_level=1)

    try:
        for name in set(names):
            (folder / name).mkdir(parents=True)
        for _ in map_in_threads(write, enumerate(zip(pictures, names, strict=True))):
            pass
    except OSError as error:
        raise UserError(f"The pictures could not be written to {folder} ({error.strerror or error}).") from error


def _link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source)
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)
