"""The estimator: scikit-learn's own tools with a real training of a few seconds."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.runs import make_tiny_birds
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.validation import check_is_fitted

from likethat import Classifier, ProtoPNetClassifier, UserError

TINY = {
    "backbone": "test_resnet",
    "weights": "none",
    "latent_width": 16,
    "input_size": 32,
    "batch_size": 8,
    "device": "cpu",
    "prototypes_per_class": 2,
    "baseline_epochs": 1,
    "joint_epochs": 1,
}


def colours(count: int, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of three colours under noise, so that training has something to find; labels in no order."""
    generator = np.random.default_rng(0)
    y = np.array(["red", "green/grass", ".blue"])[np.arange(count) % 3]
    X = generator.integers(0, 90, (count, size, size, 3))
    for channel, label in enumerate(("red", "green/grass", ".blue")):
        X[y == label, :, :, channel] += 150
    return X.astype(np.uint8), y


@pytest.fixture(scope="module")
def fitted() -> ProtoPNetClassifier:
    return ProtoPNetClassifier(**TINY).fit(*colours(36))


def test_predictions_are_those_of_the_model(fitted: ProtoPNetClassifier) -> None:
    X, y = colours(12)
    assert fitted.classes_.tolist() == [".blue", "green/grass", "red"]
    assert fitted.classifier_.classes == ("_.blue", "green∕grass", "red")
    probability = fitted.predict_proba(X)
    assert probability.shape == (12, 3)
    for row, picture in zip(probability, X, strict=True):
        expected = fitted.classifier_.predict(Image.fromarray(picture)).probabilities
        assert row.tolist() == pytest.approx([expected[name] for name in ("_.blue", "green∕grass", "red")], abs=1e-5)
    assert fitted.predict(X).tolist() == [fitted.classes_[row.argmax()] for row in probability]
    right = [guess == label for guess, label in zip(fitted.predict(X), y, strict=True)]
    assert fitted.score(X, y) == sum(right) / 12
    weight = np.arange(12.0)
    assert fitted.score(X, y, weight) == pytest.approx(sum(weight[right]) / weight.sum())


def test_columns_follow_the_labels_and_not_the_folders() -> None:
    """As numbers 2 < 10; as names of folders 10 comes first."""
    X, _ = colours(18)
    y = np.array([2, 10])[np.arange(18) % 2]
    fitted = ProtoPNetClassifier(**TINY).fit(list(X), y)
    assert fitted.classes_.tolist() == [2, 10]
    assert fitted.classifier_.classes == ("10", "2")
    prediction = fitted.classifier_.predict(Image.fromarray(X[0]))
    assert fitted.predict_proba(X[:1])[0] == pytest.approx([prediction.probabilities[name] for name in ("2", "10")])
    assert fitted.predict(X).dtype == y.dtype


def test_paths_pillow_images_and_arrays_are_alike(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    paths = sorted((birds / "train").rglob("*.jpg"))
    (tmp_path / "odd").write_bytes(paths[0].read_bytes())  # a picture whose name does not say so
    paths[0] = tmp_path / "odd"
    y = [index % 2 for index in range(len(paths))]
    by_path = ProtoPNetClassifier(**TINY).fit(paths, y)
    images = [Image.open(path) for path in paths]
    arrays = [np.asarray(image) for image in images]
    expected = by_path.predict_proba(paths)
    for pictures in (images, arrays, np.array([str(path) for path in paths]), np.stack(arrays)):
        assert np.array_equal(by_path.predict_proba(pictures), expected)
    assert len(paths) == 18
    record = by_path.classifier_.path / "config.json"
    assert '"test": 2' in record.read_text()  # one image of each class


def test_scikit_learn_takes_it(fitted: ProtoPNetClassifier) -> None:
    X, y = colours(36)
    unfitted = ProtoPNetClassifier(**TINY)
    assert is_classifier(unfitted)
    copy = clone(unfitted)
    assert copy is not unfitted
    assert copy.get_params() == unfitted.get_params() == {"preset": "default", "verbose": False, **TINY}
    check_is_fitted(fitted)
    with pytest.raises(NotFittedError):
        check_is_fitted(clone(fitted))
    scores = cross_val_score(unfitted, X, y, cv=2)
    assert scores.shape == (2,)
    assert all(0 <= score <= 1 for score in scores)
    brighter = make_pipeline(FunctionTransformer(lambda X: np.minimum(X, 250).astype(np.uint8)), unfitted)
    assert brighter.fit(X, y).predict(X[:5]).shape == (5,)
    assert brighter.predict_proba(X[:5]).sum(1) == pytest.approx(np.ones(5))
    search = GridSearchCV(unfitted, {"prototypes_per_class": [1, 2]}, cv=2, refit=False).fit(X, y)
    assert len(search.cv_results_["mean_test_score"]) == 2


def test_parameters() -> None:
    estimator = ProtoPNetClassifier(backbone="resnet34")
    assert estimator.set_params(seed=3, preset="paper") is estimator
    assert estimator.get_params() == {
        "preset": "paper",
        "device": "auto",
        "verbose": False,
        "backbone": "resnet34",
        "seed": 3,
    }
    assert repr(estimator) == "ProtoPNetClassifier(preset='paper', backbone='resnet34', seed=3)"
    assert pickle.loads(pickle.dumps(estimator)).get_params() == estimator.get_params()
    with pytest.raises(UserError, match="no parameter called 'sead'"):
        estimator.set_params(sead=3)


def test_explanations_add_up(fitted: ProtoPNetClassifier, tmp_path: Path) -> None:
    X, _ = colours(3)
    explanations = fitted.explain(X, top_classes=2)
    assert len(explanations) == 3
    for explanation, row in zip(explanations, fitted.predict_proba(X), strict=True):
        assert explanation.predicted.probability == pytest.approx(row.max(), abs=1e-5)
        assert sum(line.points for line in explanation.predicted.rows) == pytest.approx(
            explanation.predicted.logit, abs=1e-4
        )
    explanations[0].save(tmp_path / "why.png")


def test_a_model_is_kept_by_saving_it(tmp_path: Path) -> None:
    X, y = colours(18)
    estimator = ProtoPNetClassifier(**TINY).fit(X, y)
    with pytest.raises(UserError, match="save_pretrained"):
        pickle.dumps(estimator)
    folder = estimator.classifier_.path.parent
    expected = estimator.classifier_.predict(Image.fromarray(X[0]))
    estimator.classifier_.save_pretrained(tmp_path / "kept")
    model = estimator.classifier_
    del estimator
    gc.collect()
    assert model.predict(Image.fromarray(X[0])) == expected  # the folder lives as long as the model
    assert folder.is_dir()
    del model
    gc.collect()
    assert not folder.exists()
    assert Classifier.from_pretrained(tmp_path / "kept", "cpu").predict(Image.fromarray(X[0])) == expected


def test_mistakes_are_told(fitted: ProtoPNetClassifier, tmp_path: Path) -> None:
    X, y = colours(12)

    def told(message: str, X: object, y: object, **options: object) -> None:
        with pytest.raises(UserError, match=message):
            ProtoPNetClassifier(**{**TINY, **options}).fit(X, y)

    told("12 pictures and labels of shape", X, y[:5])
    told("uint8", X / 255.0, y)
    told("N, height, width, 3", X.reshape(12, -1), y)
    told("height, width, 3", np.zeros((12, 8, 8, 2), np.uint8), y)
    told("a single class", X, ["red"] * 12)
    told("cannot be opened", [tmp_path / "none.png"] * 12, y)
    told("no option called", X, y, sead=1)
    told("same name", X, np.array(["a/b", "a∕b"] * 6))
    told("the same file", np.concatenate([X[:3]] * 4), y)  # copies in training and test
    with pytest.raises(UserError, match="call fit"):
        ProtoPNetClassifier(**TINY).predict(X)
    with pytest.raises(UserError, match="also where there is only one"):
        fitted.predict("owl.jpg")
    assert fitted.predict_proba([]).shape == (0, 3)


def test_scikit_learn_is_not_needed() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import likethat; print(likethat.ProtoPNetClassifier(seed=1))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "ProtoPNetClassifier(preset='default', seed=1)"
