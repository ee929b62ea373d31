"""Where prototypes lie in their own training pictures, found as parts of any other picture are.

A run folder has these pictures as the network saw them, small and as JPEG files, so that no data set is needed. Asking
the network takes long, so what it answered is kept: in memory, and in the run folder where that can be written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from likethat.data.decode import Box, to_input
from likethat.data.files import digest_file
from likethat.data.loaders import to_unit
from likethat.errors import UserError
from likethat.explaining.attribution import UPSAMPLING, attribute
from likethat.explaining.boxes import activation_boxes
from likethat.explaining.draw.render import in_shares, read_picture
from likethat.models.protopnet import ProtoPNet
from likethat.runs import layout
from likethat.runs.atomic_files import load_tensors, save_tensors
from likethat.runs.classifier import Classifier, Prototype
from likethat.runs.manifest import update_manifest

STEP = 2  # cells between windows of occlusion, which then takes a quarter of the passes: there are many such pictures

Maps = dict[str, Tensor]  # by method and patch

_kept: WeakKeyDictionary[Classifier, Maps] = WeakKeyDictionary()


def source_shares(
    classifier: Classifier, wanted: Sequence[int], method: str, percentile: float, patience: float | None = None
) -> dict[int, Box]:
    """Return where a method finds prototypes in their own training pictures, in shares of the picture.

    It goes on for `patience` seconds, a picture at least, and leaves out what it did not come to. There is nothing to
    find where the run says it already: with the paper's method, and where boxes are windows.
    """
    if method == UPSAMPLING or classifier.sees_windows:
        return {}
    if classifier not in _kept:
        _kept[classifier] = _load(classifier.path)
    maps = _kept[classifier]
    names, networks = {p: _name(classifier.prototypes[p], method) for p in wanted}, _by_prototype(classifier)
    by_picture: dict[tuple[int, str], list[int]] = {}
    for p in wanted:
        if names[p] not in maps:
            by_picture.setdefault((networks[p][1], classifier.prototypes[p].source), []).append(p)
    started = time.monotonic()
    for number, ((first, _), together) in enumerate(by_picture.items()):
        if number and patience is not None and time.monotonic() - started > patience:
            break
        found_pHW = _find(classifier, networks[together[0]][0], first, together, method)
        maps.update(zip((names[p] for p in together), found_pHW, strict=True))
    if by_picture:
        _save(classifier.path, maps)
    shares = {}
    for p in wanted:
        if names[p] in maps:
            height, width = networks[p][0].backbone.input_size
            (box,) = activation_boxes(maps[names[p]][None], (height, width), percentile)
            shares[p] = in_shares(box, width, height)
    return shares


def _by_prototype(classifier: Classifier) -> list[tuple[ProtoPNet, int]]:
    """Return the network of each prototype, and the number of that network's first."""
    found: list[tuple[ProtoPNet, int]] = []
    for network in classifier.networks:
        found += [(network, len(found))] * len(network.prototype_layer.class_P)
    return found


def _find(classifier: Classifier, network: ProtoPNet, first: int, numbers: list[int], method: str) -> Tensor:
    """Return the maps of prototypes that are patches of one training picture, p x rows x columns."""
    own = [classifier.prototypes[p] for p in numbers]
    pixels, _ = to_input(read_picture(classifier.path, own[0].source), None, network.backbone.input_size)
    x_3HW = to_unit(torch.from_numpy(pixels).permute(2, 0, 1).to(classifier.device))
    columns = network.patch_grid[1]
    patch_p = torch.tensor([prototype.row * columns + prototype.column for prototype in own], device=classifier.device)
    chosen_p = torch.tensor(numbers, device=classifier.device) - first
    return attribute(network, x_3HW, chosen_p, method, patch_p, step=STEP).cpu()


def _name(prototype: Prototype, method: str) -> str:
    """Return a name for what is found of a patch: it depends on the picture, the place and the network alone."""
    place = (prototype.member, prototype.sha256, prototype.crop_to, prototype.row, prototype.column)
    return "/".join(map(str, (method, *place)))


def _digests(run: Path) -> list[str]:
    """Return the digests of the networks, with which a file of maps is of use."""
    files = [run / layout.MODEL, *sorted(run.glob(f"{layout.MEMBERS}/*/{layout.MODEL}"))]
    return [digest_file(file) for file in files if file.is_file()]


def _load(run: Path) -> Maps:
    with suppress(OSError, UserError, ValueError):
        maps, digests = load_tensors(run / layout.ATTRIBUTED)
        if digests == _digests(run):
            return {name: map_HW for name, map_HW in maps.items() if map_HW.ndim == 2 and bool(map_HW.isfinite().all())}
    return {}


def _save(run: Path, maps: Maps) -> None:
    with suppress(OSError, UserError):  # a folder that nobody may write into
        save_tensors(run / layout.ATTRIBUTED, dict(maps), _digests(run))
        update_manifest(run, layout.ATTRIBUTED)
