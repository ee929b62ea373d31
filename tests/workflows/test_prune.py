"""Pruning by the paper's rule and to a budget, against slow and literal versions of both."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.last_layer import kkt_residual
from helpers.runs import make_tiny_birds, make_tiny_run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from likethat.cli.parser import main
from likethat.data.cache import decode_samples
from likethat.data.dataset import DataSet, Sample
from likethat.data.loaders import hold
from likethat.errors import UserError
from likethat.inference.passes import last_layer_images
from likethat.progress import Display
from likethat.report.charts import logarithmic_ticks
from likethat.report.path import draw_path
from likethat.runs import layout
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import open_run_data
from likethat.training.last_layer import solve_last_layer
from likethat.training.pruning.prune import (
    PathPoint,
    choose_point,
    connected_prototypes,
    own_neighbours,
    prototypes_to_keep,
    refit_last_layer,
)
from likethat.training.pruning.thin import fewest_within_error, share_budget, untold
from likethat.workflows.derived import open_member
from likethat.workflows.prune import Pruned, _prune_to_budget, drop_unconnected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("prune"))


@pytest.fixture(scope="module")
def pruned(run: Path) -> Path:
    out = run.parent / "pruned"
    assert main(["prune", str(run), "--out", str(out), "--k", "5", "--threshold", "3", "--keep-one"]) == 0
    return out


def distances_to(classifier: Classifier, dataset: DataSet, sample: Sample) -> list[float]:
    """Of every prototype to the nearest patch of one picture, patch by patch."""
    network = classifier.networks[0]
    prepared = classifier.prepare(dataset.root / sample.path, sample.box)
    with torch.no_grad():
        patch_DHW = network.prototype_layer.patches(network.latent(prepared.pixels[0][None].float() / 255))[0]
    patches, vectors = patch_DHW.double().flatten(1).T, network.prototype_layer.vectors().detach().double()
    return [min(float((patch - vector).square().sum()) for patch in patches) for vector in vectors]


def by_hand(run: Path, k: int, threshold: int) -> tuple[list[int], list[int]]:
    """Own-class images among the k nearest of every prototype, and the prototypes that stay, one per class at least."""
    classifier = load(run, "cpu")
    dataset = open_run_data(classifier, None)
    rows = [distances_to(classifier, dataset, sample) for sample in dataset.train]
    own = []
    for p, prototype in enumerate(classifier.prototypes):
        nearest = sorted(range(len(rows)), key=lambda image: rows[image][p])[:k]
        own.append(sum(dataset.train[image].label == prototype.label for image in nearest))
    keep = {p for p in range(len(own)) if own[p] >= threshold}
    for label in range(len(classifier.classes)):
        members = [p for p, prototype in enumerate(classifier.prototypes) if prototype.label == label]
        if not keep & set(members):
            keep.add(max(members, key=lambda p: (own[p], -p)))
    return own, sorted(keep)


def line_of(run: Path, stage: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / layout.METRICS).read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage][-1]


def test_the_rule_is_the_papers(run: Path, pruned: Path) -> None:
    own, keep = by_hand(run, k=5, threshold=3)
    assert len(set(own)) > 1
    assert 3 <= len(keep) < 9, "this run does not put the rule to the test"
    before, after = load(run, "cpu"), load(pruned, "cpu")
    assert [(p.path, p.row, p.column) for p in after.prototypes] == [
        (before.prototypes[p].path, before.prototypes[p].row, before.prototypes[p].column) for p in keep
    ]
    layer = before.networks[0].prototype_layer
    assert torch.equal(after.networks[0].prototype_layer.prototype_PDhw, layer.prototype_PDhw[keep])
    assert torch.equal(after.networks[0].prototype_layer.unprojected_PDhw, layer.unprojected_PDhw[keep])
    assert torch.equal(after.networks[0].prototype_layer.class_P, layer.class_P[keep])
    removed = line_of(pruned, "prune")["removed"]
    for name in before.classes:
        all_of_class = {p for p, prototype in enumerate(before.prototypes) if prototype.class_name == name}
        assert removed[name] == len(all_of_class - set(keep))


def test_the_last_layer_is_optimal_again(pruned: Path) -> None:
    """On views, whose scores no prototype gives that was cut from the picture, as in training."""
    classifier, config = load(pruned, "cpu"), layout.read_record(pruned).config
    dataset = open_run_data(classifier, None)
    pixels = decode_samples(dataset.root, dataset.train, config.model.input_size).pixels
    views = last_layer_images(hold(pixels, dataset.train, torch.device("cpu")), config)
    rows = []
    for number, sample in enumerate(dataset.train * config.train.last_layer_views):
        score = classifier.networks[0](views.batch(torch.tensor([number]))[0]).score_BP[0].tolist()
        fair = list(score)
        for p, prototype in enumerate(classifier.prototypes):
            if prototype.path == sample.path:
                mates = [
                    score[q]
                    for q, other in enumerate(classifier.prototypes)
                    if other.label == prototype.label and other.path != sample.path
                ]
                fair[p] = sum(mates) / len(mates) if mates else score[p]
        rows.append(fair)
    settings = config.train
    label_N = torch.tensor([sample.label for sample in dataset.train * settings.last_layer_views])
    residual = kkt_residual(
        classifier.weight_KP,
        torch.tensor(rows),
        label_N,
        classifier.networks[0].prototype_layer.class_P,
        lam=settings.l1,
        ridge=settings.ridge,
        own_positive=settings.own_positive,
    )
    assert residual < 2e-5


def test_a_pruned_run_is_a_run_like_any_other(run: Path, pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = load(run, "cpu"), load(pruned, "cpu")
    assert [prototype.id for prototype in after.prototypes] == list(range(len(after.prototypes)))
    old = {(p.path, p.row, p.column): p for p in before.prototypes}
    for prototype in after.prototypes:
        was = old[prototype.path, prototype.row, prototype.column]
        assert (pruned / prototype.crop).read_bytes() == (run / was.crop).read_bytes()
        assert (pruned / prototype.source).read_bytes() == (run / was.source).read_bytes()
        assert after.classes[prototype.label] == prototype.class_name == was.class_name
    counts = layout.read_record(pruned).prototypes_of_class
    assert counts == tuple(sum(p.label == k for p in after.prototypes) for k in range(len(after.classes)))
    assert main(["verify", str(pruned)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(pruned), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == line_of(pruned, "test")["accuracy"]
    assert main(["info", str(pruned)]) == 0
    assert "validation after pruning" in capsys.readouterr().out
    old_lines = (run / layout.METRICS).read_text()
    assert (pruned / layout.METRICS).read_text().startswith(old_lines)
    assert "Pruning" in (pruned / layout.REPORT).read_text()
    assert not (pruned / "checkpoints").exists()


def test_mistakes_are_told_and_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "never"
    before = sorted(path.name for path in run.parent.iterdir())

    def told(*arguments: str) -> str:
        assert main(["prune", str(run), "--out", str(out), *arguments]) == 2
        assert sorted(path.name for path in run.parent.iterdir()) == before
        return capsys.readouterr().err

    own, _ = by_hand(run, k=6, threshold=6)
    classifier = load(run, "cpu")
    empty = [
        name
        for name in classifier.classes
        if all(count < 6 for count, p in zip(own, classifier.prototypes, strict=True) if p.class_name == name)
    ]
    assert empty, "this run does not put the message to the test"
    text = told("--threshold", "6")
    assert all(name in text for name in empty)
    assert "--keep-one" in text
    assert "between 1 and --k" in told("--k", "2", "--threshold", "3")
    assert "between 1 and --k" in told("--threshold", "0")
    assert "prune twice" in told("--budget", "20", "--k", "3")
    assert "--budget must be 3 or more, not 2" in told("--budget", "2")
    assert "prune twice" in told("--per-class", "2", "--budget", "5")
    assert "at least 1 prototype" in told("--per-class", "0")
    assert "invalid" in told("--per-class", "few")
    assert "--overwrite" in (main(["prune", str(run), "--out", str(run)]), capsys.readouterr().err)[1]


def test_changed_images_are_noticed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_tiny_birds(tmp_path / "other", seed=1)
    assert main(["prune", str(run), "--out", str(tmp_path / "out"), "--data", str(other), "--keep-one"]) == 2
    assert "not those that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_budget(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--out", str(tmp_path / "lean"), "--budget", "13", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    path = told["path"]
    assert path[0]["connections"] <= 9, "at the largest lambda only own-class connections are left, if they help"
    assert path[-1]["connections"] > 13, "at the smallest, more than the budget"
    assert all(a["lam"] > b["lam"] for a, b in pairwise(path))
    allowed = [point for point in path if point["connections"] <= 13]
    best = max(point["accuracy"] for point in allowed)
    fewest = min(point["connections"] for point in allowed if point["accuracy"] == best)
    chosen = path[told["chosen"]]
    assert (chosen["accuracy"], chosen["connections"]) == (best, fewest)

    classifier = load(tmp_path / "lean", "cpu")
    assert len(classifier.prototypes) == told["prototypes"] <= 9
    assert_connected(classifier)
    assert int((classifier.weight_KP != 0).sum()) == told["connections"] <= chosen["connections"]
    dataset = open_run_data(classifier, None)
    right = [
        classifier.predict(dataset.root / sample.path).class_name == dataset.classes[sample.label]
        for sample in dataset.val
    ]
    assert sum(right) / len(right) == pytest.approx(told["after"]["accuracy"])
    assert layout.read_record(tmp_path / "lean").config.train.l1 == chosen["lam"]
    picture = (tmp_path / "lean" / layout.PATH).read_text()
    assert picture.count("<circle") == len(path) + 1
    assert picture.strip() in (tmp_path / "lean" / layout.REPORT).read_text()
    assert main(["verify", str(tmp_path / "lean")]) == 0


def test_a_budget_is_kept_by_the_objective_of_the_run(run: Path, tmp_path: Path) -> None:
    """Its ridge may be stronger on prototypes that another class looks like, too."""
    member = open_member(load(run, "cpu"), 0, None, tmp_path, Display(quiet=True), nearest=None)
    settings = replace(member.record.config.train, exclusive=True)
    record = replace(member.record, config=replace(member.record.config, train=settings))
    (pruned,), _ = _prune_to_budget([replace(member, record=record)], 13, Display(quiet=True))
    for exclusive in (True, False):
        settings = replace(pruned.settings, exclusive=exclusive)
        objective = refit_last_layer(member.scores["train"], None, settings).objective
        assert (pruned.solution.objective == pytest.approx(objective, abs=1e-6)) == exclusive


def by_loop(run: Path, lam: float, least: int, target: int) -> list[list[int]]:
    """The prototypes that are left after each round, by the definition: a regression and a solution for each."""
    classifier, config = load(run, "cpu"), layout.read_record(run).config
    dataset = open_run_data(classifier, None)
    network, belongs = classifier.networks[0], [prototype.label for prototype in classifier.prototypes]

    def scores(part: list[Sample], views: bool) -> tuple[Tensor, Tensor]:
        pixels = decode_samples(dataset.root, part, config.model.input_size).pixels
        images = hold(pixels, part, torch.device("cpu"))
        images = last_layer_images(images, config) if views else images
        with torch.no_grad():
            batches = [images.batch(torch.tensor([number])) for number in range(len(images.label_N))]
            return torch.cat([network(batch[0]).score_BP for batch in batches]), images.label_N

    (train, label), (val, val_label) = scores(dataset.train, True), scores(dataset.val, False)
    source = [[s.path for s in dataset.train].index(p.path) for p in classifier.prototypes]

    def fair(keep: list[int]) -> Tensor:
        score = train[:, keep].clone()
        for column, p in enumerate(keep):
            mates = [c for c, q in enumerate(keep) if belongs[q] == belongs[p] and source[q] != source[p]]
            for row in range(source[p], len(train), len(dataset.train)):
                if mates:
                    score[row, column] = train[row, [keep[c] for c in mates]].mean()
        return score

    def solve(keep: list[int]) -> Tensor:
        class_p = torch.tensor([belongs[p] for p in keep])
        settings = {"lam": lam, "ridge": config.train.ridge, "own_positive": config.train.own_positive}
        return solve_last_layer(fair(keep), label, class_p, len(classifier.classes), **settings).weight_KP

    keep = list(range(len(belongs)))
    rounds = [keep]
    while len(keep) > target:
        weight, known, costs = solve(keep), fair(keep).double().numpy(), {}
        for column, p in enumerate(keep):
            mates = [c for c, q in enumerate(keep) if belongs[q] == belongs[p] and c != column]
            told = np.linalg.lstsq(known[:, mates], known[:, column], rcond=None)[0]
            beyond = val[:, p].double() - val[:, [keep[c] for c in mates]].double() @ torch.from_numpy(told)
            logits = val[:, keep].double() @ weight.double().T - beyond[:, None] * weight[:, column].double()
            costs[p] = float(torch.nn.functional.cross_entropy(logits, val_label))
        free = [p for p in keep if sum(belongs[q] == belongs[p] for q in keep) > least]
        if not free:
            break
        keep = [p for p in keep if p != min(free, key=costs.__getitem__)]  # a tenth of nine is one at a time
        rounds.append(keep)
    return rounds


def places(classifier: Classifier) -> list[tuple[str, int, int]]:
    return [(prototype.path, prototype.row, prototype.column) for prototype in classifier.prototypes]


def assert_connected(classifier: Classifier) -> None:
    """Every prototype has a connection, or its class has no other."""
    connected = (classifier.weight_KP != 0).any(0).tolist()
    labels = [prototype.label for prototype in classifier.prototypes]
    assert all(some or labels.count(label) == 1 for some, label in zip(connected, labels, strict=True))


def test_a_budget_below_one_connection_a_prototype(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load(run, "cpu")
    for budget in (7, 3):
        out = tmp_path / str(budget)
        assert main(["prune", str(run), "--out", str(out), "--budget", str(budget), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["connections"] <= budget, "own-class connections that would be negative are zero"
        lam = layout.read_record(out).config.train.l1
        after = load(out, "cpu")
        left = [places(before)[p] for p in by_loop(run, lam, least=1, target=budget)[-1]]
        assert set(places(after)) <= set(left)
        assert_connected(after)
        assert int((after.weight_KP != 0).sum()) == told["connections"]
        assert min(layout.read_record(out).prototypes_of_class) >= 1
        assert sum(told["removed"].values()) == 9 - told["prototypes"] >= 9 - budget
        assert f"At most {budget} connections were allowed" in (out / layout.REPORT).read_text()
        assert main(["verify", str(out)]) == 0
        capsys.readouterr()


def test_prototypes_without_any_connection_leave(run: Path, tmp_path: Path) -> None:
    weight_KP = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0.0, 0, 0, 0, -0.2, 0]])
    class_P = torch.tensor([0, 0, 1, 1, 2, 2])
    assert connected_prototypes(weight_KP, class_P).tolist() == [0, 2, 4], "one of a class stays in any case"
    member = open_member(load(run, "cpu"), 0, None, tmp_path, Display(quiet=True), nearest=None)
    score_NP = member.scores["train"].score_NP
    score_NP[:, 1] = -(member.scores["train"].label_N == 0).float()  # speaks against its own class, which is forbidden
    settings = replace(member.record.config.train, l1=100.0, own_positive=True)
    solution = refit_last_layer(member.scores["train"], None, settings)
    assert not solution.weight_KP[:, 1].any()
    pruned = drop_unconnected(Pruned(member, torch.arange(9), solution, settings))
    kept = pruned.keep_p.tolist()
    assert 1 not in kept
    assert {p // 3 for p in kept} == {0, 1, 2}
    again = refit_last_layer(member.scores["train"].select(pruned.keep_p), None, settings)
    # One optimum, reached from two starts: the objective is flat there, so that it says more than the weights do.
    assert pruned.solution.objective == pytest.approx(again.objective, abs=1e-7)
    assert torch.equal(pruned.solution.weight_KP != 0, again.weight_KP != 0)
    assert torch.allclose(pruned.solution.weight_KP, again.weight_KP, atol=1e-2)


def test_a_number_of_prototypes_for_each_class(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, lam = load(run, "cpu"), layout.read_record(run).config.train.l1
    assert main(["prune", str(run), "--out", str(tmp_path / "two"), "--per-class", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["per_class"] == 2
    two = load(tmp_path / "two", "cpu")
    rounds = by_loop(run, lam, least=2, target=0)
    assert places(two) == [places(before)[p] for p in rounds[-1]]
    assert layout.read_record(tmp_path / "two").prototypes_of_class == (2, 2, 2)
    assert "At most 2 prototypes of each class" in (tmp_path / "two" / layout.REPORT).read_text()

    assert main(["prune", str(run), "--out", str(tmp_path / "auto"), "--per-class", "auto", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rounds = by_loop(run, lam, least=1, target=0)
    auto = load(tmp_path / "auto", "cpu")
    assert places(auto) in [[places(before)[p] for p in keep] for keep in rounds]
    error = math.sqrt(told["before"]["accuracy"] * (1 - told["before"]["accuracy"]) / 9)
    assert told["after"]["accuracy"] >= told["before"]["accuracy"] - error
    assert "within one standard error" in (tmp_path / "auto" / layout.REPORT).read_text()
    assert main(["verify", str(tmp_path / "auto")]) == 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_the_fewest_within_an_error(right: list[int]) -> None:
    shares = [count / 20 for count in right]
    error = math.sqrt(shares[0] * (1 - shares[0]) / 20)
    chosen = fewest_within_error(shares, 20)
    assert shares[chosen] >= shares[0] - error
    assert all(share < shares[0] - error for share in shares[chosen + 1 :])


@given(st.integers(1, 5), st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 200))
def test_members_share_a_budget(classes: int, beyond: list[int], budget: int) -> None:
    counts = [classes + more for more in beyond]
    if budget < classes * len(counts):
        with pytest.raises(UserError, match=f"must be {classes * len(counts)} or more"):
            share_budget(budget, counts, classes)
        return
    shares = share_budget(min(budget, sum(counts)), counts, classes)
    assert sum(shares) <= budget
    assert all(classes <= share <= count for share, count in zip(shares, counts, strict=True))


def test_a_copy_is_not_missed() -> None:
    """Of two prototypes that fire together one tells all that the other does; the third one tells something else."""
    generator = torch.Generator().manual_seed(0)
    score_N3 = torch.rand(50, 3, generator=generator, dtype=torch.double)
    score_N3[:, 1] = 2 * score_N3[:, 0] + 1e-3 * score_N3[:, 1]
    beyond_N3 = score_N3 @ untold(score_N3)
    assert float(beyond_N3[:, :2].abs().max()) < 0.01
    others = score_N3[:, :2]
    expected = score_N3[:, 2] - others @ torch.linalg.pinv(others, rtol=1e-3) @ score_N3[:, 2]
    assert torch.allclose(beyond_N3[:, 2], expected, atol=0.05)
    assert float(beyond_N3[:, 2].abs().max()) > 0.1


def test_a_pruning_is_repeatable(run: Path, pruned: Path, tmp_path: Path) -> None:
    assert main(["prune", str(run), "--out", str(tmp_path / "again"), "--k", "5", "--keep-one"]) == 0

    def digest(folder: Path) -> list[str]:
        kept = (path for path in folder.rglob("*") if path.name != "manifest.json")  # metrics.jsonl has seconds
        files = sorted(path for path in kept if path.suffix in (".jpg", ".safetensors", ".json"))
        return [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]

    assert digest(pruned) == digest(tmp_path / "again")


@given(st.data())
def test_keep_counts_like_a_loop(data: st.DataObject) -> None:
    classes = data.draw(st.integers(1, 4))
    images = data.draw(st.integers(3, 9))
    label = data.draw(st.lists(st.integers(0, classes - 1), min_size=images, max_size=images))
    belongs = sorted([*range(classes), *data.draw(st.lists(st.integers(0, classes - 1), max_size=6))])
    k = data.draw(st.integers(1, 3))
    nearest = [data.draw(st.permutations(range(images)))[:k] for _ in belongs]
    threshold = data.draw(st.integers(1, k))
    own = [sum(label[image] == c for image in row) for row, c in zip(nearest, belongs, strict=True)]
    assert own_neighbours(torch.tensor(nearest), torch.tensor(label), torch.tensor(belongs)).tolist() == own

    names = [f"class {c}" for c in range(classes)]
    good = [p for p in range(len(belongs)) if own[p] >= threshold]
    empty = [c for c in range(classes) if c not in {belongs[p] for p in good}]
    saved = [max((p for p in range(len(belongs)) if belongs[p] == c), key=lambda p: (own[p], -p)) for c in empty]
    arguments = (torch.tensor(own), torch.tensor(belongs), names)
    assert prototypes_to_keep(*arguments, threshold=threshold, keep_one=True).tolist() == sorted([*good, *saved])
    if empty:
        with pytest.raises(UserError, match=names[empty[0]]):
            prototypes_to_keep(*arguments, threshold=threshold, keep_one=False)
    else:
        assert prototypes_to_keep(*arguments, threshold=threshold, keep_one=False).tolist() == good


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=8), st.integers(0, 25))
def test_choice_on_the_path(points: list[tuple[int, int]], budget: int) -> None:
    path = [PathPoint(1.0, connections, right / 4) for connections, right in points]
    allowed = [(-right, connections) for connections, right in points if connections <= budget]
    if not allowed:
        with pytest.raises(UserError, match=f"sparsest has {min(connections for connections, _ in points)}"):
            choose_point(path, budget)
    else:
        chosen = path[choose_point(path, budget)]
        assert (-chosen.accuracy * 4, chosen.connections) == min(allowed)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 50)), min_size=1, max_size=20), st.integers(1, 10**6))
def test_the_picture_of_any_path(points: list[tuple[int, int]], budget: int) -> None:
    path = [{"lam": 1.0, "connections": connections, "accuracy": right / 50} for connections, right in points]
    picture = draw_path(path, len(path) - 1, budget)
    assert "nan" not in picture
    assert "150%" not in picture
    drawn = [float(value.split('"')[0]) for value in picture.split('cx="')[1:]]
    assert all(0 <= value <= 560 and math.isfinite(value) for value in drawn)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_ticks_lie_on_the_axis(low: int, more: int) -> None:
    ticks = logarithmic_ticks(low, low + more)
    assert 1 <= len(ticks) <= 6
    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= low + more for tick in ticks)
