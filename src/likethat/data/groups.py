"""Holding out whole groups: pictures of one patient, nest or burst never lie in two parts."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from likethat.data.dataset import Sample


class Group(NamedTuple):
    """Pictures that stay together; one without a group is alone in its own."""

    samples: tuple[Sample, ...]
    count_of: dict[int, int]  # label -> pictures
    draw: bytes  # random, but the same for the same seed


def hold_out_groups(samples: Sequence[Sample], fractions: Sequence[float], *, seed: int) -> list[tuple[Sample, ...]]:
    """Take each fraction out of the samples: [rest, part of the first fraction, of the second, ...].

    Every class comes as near to its fractions as its groups allow, rare classes first: what frequent ones then have too
    much of in a part is made good by groups that have nothing else. A class gives each part a group while it keeps one
    itself.
    """
    total_of = Counter(sample.label for sample in samples)
    shares = (1 - sum(fractions), *fractions)
    missing = [{label: share * total for label, total in total_of.items()} for share in shares]  # pictures, by class
    groups_in: list[Counter[int]] = [Counter() for _ in shares]  # how many of each class every part has
    parts: list[list[Group]] = [[] for _ in shares]

    def put(group: Group, part: int) -> None:
        parts[part].append(group)
        for label, count in group.count_of.items():
            missing[part][label] -= count
            groups_in[part][label] += 1

    for label, groups in _by_rarest_class(_make_groups(samples, seed), total_of).items():
        for number, group in enumerate(groups):
            empty = [part for part in range(len(shares)) if not groups_in[part][label]]
            allowed = empty if len(empty) >= len(groups) - number else range(len(shares))
            # Of parts without any group of the class the rest is served first, then the first fraction.
            put(group, allowed[0] if allowed is empty else max(allowed, key=lambda part: missing[part][label]))
    _give_training_every_class(parts, groups_in)
    return [tuple(sample for group in part for sample in group.samples) for part in parts]


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """Return the number of each sample's group, in the order in which groups appear."""
    number_of: dict[str | tuple[str], int] = {}
    return [number_of.setdefault(group_of(sample), len(number_of)) for sample in samples]


def group_of(sample: Sample) -> str | tuple[str]:
    """Return what pictures of one group have in common; one without a group is alone in its own."""
    return (sample.path,) if sample.group is None else sample.group


def _make_groups(samples: Sequence[Sample], seed: int) -> list[Group]:
    members: dict[str | tuple[str], list[Sample]] = {}
    for sample in samples:
        members.setdefault(group_of(sample), []).append(sample)
    groups = []
    for key, together in members.items():
        count_of: dict[int, int] = {}
        for sample in together:
            count_of[sample.label] = count_of.get(sample.label, 0) + 1
        draw = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogateescape")).digest()
        groups.append(Group(tuple(together), count_of, draw))
    return groups


def _by_rarest_class(groups: Sequence[Group], total_of: Counter[int]) -> dict[int, list[Group]]:
    """Return the groups under the rarest class that each has, rare classes first, and large groups first: what is left
    to fill gaps with is small. Groups of about one size are in a random order."""
    of_class: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        of_class[min(group.count_of, key=lambda label: (total_of[label], label))].append(group)
    for own in of_class.values():
        own.sort(key=lambda group: (-len(group.samples).bit_length(), group.draw))
    return {label: of_class[label] for label in sorted(of_class, key=lambda label: (total_of[label], label))}


def _give_training_every_class(parts: list[list[Group]], groups_in: list[Counter[int]]) -> None:
    """Move the smallest group of a class that training has none of, as when all its groups went with rarer classes."""
    for label in sorted({label for counts in groups_in for label in counts if not groups_in[0][label]}):
        if groups_in[0][label]:  # an earlier move has brought it along
            continue
        having = [
            (len(group.samples), group.draw, part, place)
            for part, own in enumerate(parts)
            for place, group in enumerate(own)
            if label in group.count_of
        ]
        _, _, part, place = min(having)
        group = parts[part].pop(place)
        parts[0].append(group)
        for own in group.count_of:
            groups_in[part][own] -= 1
            groups_in[0][own] += 1
