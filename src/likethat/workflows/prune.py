"""A run with fewer prototypes or fewer connections: what `likethat prune` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from likethat.config.settings import TrainConfig
from likethat.data.dataset import PARTS
from likethat.data.folder_kinds import is_run
from likethat.errors import UserError
from likethat.inference.passes import accuracy, measure
from likethat.progress import Display
from likethat.report.path import draw_path
from likethat.runs import layout
from likethat.runs.atomic_files import whole_folder, write_text
from likethat.runs.classifier import load
from likethat.runs.looks import count_looks
from likethat.training.last_layer import LastLayerSolution, solve_path, terms_of
from likethat.training.pruning import prune as rules
from likethat.training.pruning.thin import Thinned, fewest_within_error, share_budget, thin
from likethat.workflows.derived import Member, copy_history, open_member, write_combined, write_network
from likethat.workflows.run_conclusion import conclude


@dataclass(frozen=True)
class Pruned:
    """What remains of a member."""

    member: Member
    keep_p: Tensor
    solution: LastLayerSolution
    settings: TrainConfig  # with the lambda that the solution belongs to

    @property
    def device(self) -> torch.device:
        return self.solution.weight_KP.device

    def logits(self, part: str) -> Tensor:
        return self.member.scores[part].logits(self.solution.weight_KP, self.keep_p)


def prune(
    run: str | Path,
    out: str | Path,
    *,
    k: int = rules.NEAREST,
    threshold: int = rules.THRESHOLD,
    keep_one: bool = False,
    budget: int | None = None,
    per_class: int | Literal["auto"] | None = None,
    data: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    display: Display | None = None,
) -> dict[str, Any]:
    """Remove the prototypes with fewer than `threshold` images of their own class among their k nearest training
    images; or, with a `budget`, keep at most so many connections that are not zero; or, with `per_class`, at most so
    many prototypes of each class, or as few of each as the validation images allow ("auto").

    A budget below the number of prototypes removes prototypes, too: those that the validation images miss least.

    Each network of a combined run is pruned by itself, so that the run stays the sum of its members.
    """
    started = time.monotonic()
    display, out = display or Display(quiet=True), Path(out)
    if not 1 <= threshold <= k:
        raise UserError(f"--threshold must lie between 1 and --k, which is {k}; {threshold} does not.")
    if isinstance(per_class, int) and per_class < 1:
        raise UserError(f"--per-class keeps at least 1 prototype of each class, not {per_class}; or takes auto.")
    classifier = load(run, device)
    with whole_folder(out, is_run, overwrite=overwrite) as target:
        count = len(classifier.networks)
        by_rule, scratch = budget is None and per_class is None, target.parent  # which goes when all is done
        nearest = k if by_rule else None
        members = [open_member(classifier, n, data, scratch, display, nearest=nearest) for n in range(count)]
        _check_same_parts(members)
        asked: dict[str, Any]
        if per_class is not None:
            pruned, asked = [_thin(member, per_class, display) for member in members], {"per_class": per_class}
        elif budget is None:
            pruned = [_prune_by_rule(member, threshold, keep_one) for member in members]
            asked = {"k": k, "threshold": threshold}
        elif budget < len(classifier.prototypes):
            pruned, asked = _thin_to_budget(members, budget, display), {"budget": budget}
        else:
            pruned, asked = _prune_to_budget(members, budget, display)
        pruned = [drop_unconnected(part, sparse="path" in asked) for part in pruned]
        asked["seconds"] = time.monotonic() - started
        return _write(target, classifier.path, pruned, asked)


def _check_same_parts(members: Sequence[Member]) -> None:
    parts = [[{sample.path for sample in m.dataset.part(part)} for part in PARTS] for m in members]
    if any(part != parts[0] for part in parts):
        raise UserError(
            "The combined runs were trained on different images, so none judges them all fairly; prune each run before "
            "it is combined."
        )


def _prune_by_rule(member: Member, threshold: int, keep_one: bool) -> Pruned:
    scores = member.scores["train"]
    assert member.nearest_Pk is not None
    own_P = rules.own_neighbours(member.nearest_Pk, scores.label_N, scores.class_P)
    keep_p = rules.prototypes_to_keep(
        own_P, scores.class_P, member.dataset.classes, threshold=threshold, keep_one=keep_one
    )
    settings = member.record.config.train
    solution = rules.refit_last_layer(scores.select(keep_p), member.weight_KP[:, keep_p], settings)
    return Pruned(member, keep_p, solution, settings)


def _thin(member: Member, per_class: int | Literal["auto"], display: Display) -> Pruned:
    """Keep so many prototypes of each class, with the run's own lambda."""
    settings, val = member.record.config.train, member.scores["val"]
    least = 1 if per_class == "auto" else per_class
    found = _followed(member, settings, display, least=least, target=0)
    chosen = len(found) - 1
    if per_class == "auto":
        accuracies = [accuracy(val.logits(one.solution.weight_KP, one.keep_p), val.label_N) for one in found]
        chosen = fewest_within_error(accuracies, len(val.label_N))
    return Pruned(member, found[chosen].keep_p, found[chosen].solution, settings)


def _thin_to_budget(members: Sequence[Member], budget: int, display: Display) -> list[Pruned]:
    """Remove prototypes until there are few enough: one connection a prototype is the least."""
    counts = [len(member.prototypes) for member in members]
    pruned = []
    for member, target in zip(members, share_budget(budget, counts, len(members[0].dataset.classes)), strict=True):
        settings = replace(member.record.config.train, l1=rules.lambda_for_any(member.scores["train"]))
        last = _followed(member, settings, display, least=1, target=target)[-1]
        pruned.append(Pruned(member, last.keep_p, last.solution, settings))
    return pruned


def _followed(member: Member, settings: TrainConfig, display: Display, *, least: int, target: int) -> list[Thinned]:
    """Return all models on the way to fewer prototypes."""
    scores, found = member.scores, []
    count, fewest = len(member.prototypes), max(target, least * len(member.dataset.classes))
    with display.task("prototypes leave") as advance:
        for one in thin(scores["train"], scores["val"], settings, least=least, target=target):
            found.append(one)
            advance(min(count - len(one.keep_p), count - fewest), max(1, count - fewest))
    return found


def _prune_to_budget(members: Sequence[Member], budget: int, display: Display) -> tuple[list[Pruned], dict[str, Any]]:
    """Prune all members with one lambda, chosen on validation images."""
    settings = [member.record.config.train for member in members]
    train = [member.scores["train"].fair() for member in members]
    lambdas = rules.path_lambdas(max(map(rules.largest_lambda, train, settings)))
    paths = []
    with display.task("path over lambda") as advance:
        for number, (scores, own) in enumerate(zip(train, settings, strict=True)):
            data = (scores.score_NP, scores.label_N, scores.class_P, scores.num_classes)
            paths.append(solve_path(*data, lambdas, **terms_of(own), weight_N=scores.weight_N))
            advance(number + 1, len(members))
    steps = [
        [
            Pruned(member, torch.arange(len(member.prototypes)), solution, replace(own, l1=lam))
            for member, solution, own in zip(members, solutions, settings, strict=True)
        ]
        for lam, solutions in zip(lambdas, zip(*paths, strict=True), strict=True)
    ]
    path = [
        rules.PathPoint(lam, _connections(step), _measure(step)["accuracy"])
        for lam, step in zip(lambdas, steps, strict=True)
    ]
    chosen = rules.choose_point(path, budget)
    return steps[chosen], {"budget": budget, "chosen": chosen, "path": [asdict(point) for point in path]}


def drop_unconnected(pruned: Pruned, *, sparse: bool = False) -> Pruned:
    """Remove the prototypes that are left without any connection. The last layer is solved again, since they may have
    stood in for others on the images these were cut from; with `sparse`, unless that takes more connections."""
    scores, solution, keep_p = pruned.member.scores["train"], pruned.solution, pruned.keep_p.to(pruned.device)
    while True:
        stay_q = rules.connected_prototypes(solution.weight_KP, scores.class_P[keep_p])
        if len(stay_q) == len(keep_p):
            return replace(pruned, keep_p=keep_p, solution=solution)
        keep_p = keep_p[stay_q]
        left = replace(solution, weight_KP=solution.weight_KP[:, stay_q])
        solved = rules.refit_last_layer(scores.select(keep_p), left.weight_KP, pruned.settings)
        solution = left if sparse and _count(solved) > _count(left) else solved


def _connections(pruned: Sequence[Pruned]) -> int:
    return sum(_count(part.solution) for part in pruned)


def _count(solution: LastLayerSolution) -> int:
    return int((solution.weight_KP != 0).sum())


def _measure(pruned: Sequence[Pruned]) -> dict[str, float]:
    """Measure the sum of the members' logits on validation images."""
    logits_NK = torch.stack([part.logits("val") for part in pruned]).sum(0)
    return measure(logits_NK, pruned[0].member.scores["val"].label_N)


def _describe(pruned: Sequence[Pruned], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the line of metrics.jsonl about these members together."""
    members = [part.member for part in pruned]
    before_NK = torch.stack([m.scores["val"].logits(m.weight_KP) for m in members]).sum(0)
    removed = dict.fromkeys(members[0].dataset.classes, 0)
    for part in pruned:
        kept = set(part.keep_p.tolist())
        for number, prototype in enumerate(part.member.prototypes):
            removed[prototype.class_name] += number not in kept
    return {
        "stage": "prune",
        **asked,
        "lambda": pruned[0].settings.l1,
        "removed": removed,
        "prototypes": sum(len(part.keep_p) for part in pruned),
        "connections": _connections(pruned),
        "nonzero_negative": sum(part.solution.nonzero_negative for part in pruned),
        "kkt_residual": max(part.solution.kkt_residual for part in pruned),
        "before": measure(before_NK, members[0].scores["val"].label_N),
        "after": _measure(pruned),
    }


def _write(target: Path, run: Path, pruned: Sequence[Pruned], asked: dict[str, Any]) -> dict[str, Any]:
    """Write the run folder, with those of its members where it is a combined one; test images are judged last."""
    folders, metrics = layout.read_record(run).member_folders(), layout.read_metrics(run)
    for folder, part in zip(folders, pruned, strict=True):
        member = part.member
        record = replace(member.record, config=replace(member.record.config, train=part.settings))
        class_p, weight_Kp = member.scores["train"].class_P[part.keep_p], part.solution.weight_KP
        network, prototypes = member.network, member.prototypes
        write_network(target / folder, record, network, part.keep_p, class_p, weight_Kp, prototypes, member.path)
        copy_history(run / folder, target / folder)
    line = _describe(pruned, asked)
    metrics.append(line)
    if len(folders) > 1:
        write_combined(target, [layout.read_record(target / folder) for folder in folders])
        metrics.append(_conclude_members(target, run, pruned, asked))
    if "path" in asked:
        write_text(target / layout.PATH, draw_path(asked["path"], asked["chosen"], asked["budget"]))
    logits_NK = torch.stack([part.logits("test") for part in pruned]).sum(0)
    val_NK = torch.stack([part.logits("val") for part in pruned]).sum(0)
    evaluation = conclude(target, metrics, pruned[0].member.dataset, logits_NK, val_NK)
    return {**line, "test": {**evaluation.to_dict(), "looks": 1 + count_looks(metrics)}}


def _conclude_members(target: Path, run: Path, pruned: Sequence[Pruned], asked: dict[str, Any]) -> dict[str, Any]:
    """Report on the members by themselves; return the line about them in the combined run's metrics."""
    alone = {name: value for name, value in asked.items() if name in ("k", "threshold", "per_class")}
    old = next(line for line in reversed(layout.read_metrics(run)) if line["stage"] == "combine")
    members = []
    folders = layout.read_record(run).member_folders()
    for entry, folder, part in zip(old["members"], folders, pruned, strict=True):
        metrics = [*layout.read_metrics(run / folder), _describe([part], alone)]
        evaluation = conclude(target / folder, metrics, part.member.dataset, part.logits("test"), part.logits("val"))
        members.append({**entry, "prototypes": len(part.keep_p), "accuracy": evaluation.accuracy})
    return {**old, "members": members}
