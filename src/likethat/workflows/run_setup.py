"""How a run begins: its folder, its images read and decoded, and the record of both."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from likethat.config.settings import AUTO_WIDTH, Config, ModelConfig
from likethat.data.cache import LoadedDataSet, load_dataset
from likethat.data.dataset import DataSet, fingerprint, leave_out
from likethat.data.formats import open_by_config
from likethat.data.left_out import find_left_out
from likethat.data.loaders import Images, hold
from likethat.data.near_duplicates import NearDuplicate
from likethat.distributed import barrier, is_main_process, world_size
from likethat.errors import UserError
from likethat.models.backbone import Backbone
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import remove_half_files
from likethat.runs.layout import DataRecord, RunRecord
from likethat.runtime import StopFlag, physical_memory, wake

AUTO = "auto"  # numbers of prototypes by the number of a class's images
MEMORY_SHARE = 0.4  # of the machine's memory that decoded pictures may take; beyond it they stay on disk


@dataclass(frozen=True)
class PreparedRun:
    """What training starts from."""

    config: Config
    dataset: DataSet
    images: dict[str, Images]
    sha256: Mapping[str, str]
    found: frozenset[str]  # every file of the data set, the bad ones that are left out included
    near_duplicates: tuple[NearDuplicate, ...] = ()


def open_out(out: Path, config: Config, kind: str, *, resume: bool, overwrite: bool) -> RunRecord | None:
    """Check that the run may go there; return the record that a resumed run was begun with."""
    saved = layout.read_record(out) if resume and (out / layout.CONFIG).is_file() else None
    if saved is not None:
        if saved.kind != kind:
            raise UserError(f"{out} holds a {saved.kind} run, not one of this command's; choose another --out.")
        check_same_config(saved, config)
    layout.check_out(out, overwrite=overwrite, resume=resume)
    barrier()  # so that no process takes what another one begins for an earlier run
    return saved


def begin(out: Path, record: RunRecord, saved: RunRecord | None) -> None:
    """Remove an earlier run, now that images and weights are known to be good, and write this one's record."""
    barrier()
    if is_main_process():
        if saved is None:
            layout.clear_out(out)
        remove_half_files((out / layout.STATE).parent)  # each as large as a state
        record.write(out)
    barrier()
    if not (out / layout.CONFIG).is_file():
        raise UserError(f"Not every process sees {out}; choose an --out on a disk that all machines share.")


def check_same_config(saved: RunRecord, asked: Config) -> None:
    """Check that what is asked for now does not contradict the configuration that a resumed run keeps."""
    if asked.model.latent_width == AUTO_WIDTH and "latent_width" in saved.automatic:
        asked = replace(asked, model=replace(asked.model, latent_width=saved.config.model.latent_width))
    if asked.train.from_baseline and saved.config.train.from_baseline:  # which may have been moved
        asked = replace(asked, train=replace(asked.train, from_baseline=saved.config.train.from_baseline))
    if asked != saved.config:
        different = [
            f"--{name.replace('_', '-')}"
            for section, values in saved.config.to_dict().items()
            if isinstance(values, dict)
            for name, value in values.items()
            if asked.to_dict()[section][name] != value
        ]
        raise UserError(
            f"The run was begun with other settings ({', '.join(different) or '--preset'}); "
            "resume with the same command, or start a new run."
        )


def baseline_to_read(config: Config, saved: RunRecord | None, out: Path) -> tuple[Config, str]:
    """Return the configuration, and the baseline that the run is to begin with, if one was named. A run that goes on
    has read it already, wherever it is now."""
    if saved is not None and (out / layout.STATE).is_file():
        return replace(config, train=saved.config.train), ""
    return config, config.train.from_baseline


def with_weights(record: RunRecord, backbone: Backbone, saved: RunRecord | None, out: Path) -> RunRecord:
    """Return the record with the weights that the run begins with, or began with where it goes on."""
    goes_on = saved is not None and (out / layout.STATE).is_file()
    return replace(record, began_with=saved.began_with if saved and goes_on else backbone.began_with)


def check_same_images(saved: RunRecord | None, now: RunRecord, run: Path) -> None:
    if saved is not None and saved.data.fingerprint != now.data.fingerprint:
        raise UserError(
            f"The images under {now.data.root} are not those that {run} was begun with; restore them or start a new "
            "run."
        )


def prepare(
    data: Path,
    out: Path,
    config: Config,
    device: torch.device,
    display: Display,
    stop: StopFlag | None = None,
    *,
    begins: bool = True,
    without: Set[str] = frozenset(),
) -> PreparedRun:
    """Read, check and decode every image once, but for those to do without; where there are problems, tell all of them
    and stop. Of a run that `begins`, what is good to know of its images is told, too."""
    dataset = leave_out(open_by_config(data, config), without)
    for note in find_left_out(dataset) if is_main_process() else ():
        display.line(f"note: {note}")
    barrier()  # so that no process takes what another one begins among the images for a class
    height, width = config.model.input_size
    too_large = len(dataset.all_samples()) * height * width * 3 > MEMORY_SHARE * physical_memory()
    sleeps = True
    with display.task("reading images") as advance:

        def go_on(done: int, total: int) -> None:
            nonlocal sleeps
            if sleeps:  # the processes that read are forked by now
                wake(device)
            sleeps = False
            advance(done, total)
            if stop is not None:
                stop.check()

        loaded = load_dataset(
            dataset,
            config.model.input_size,
            skip_bad=config.data.skip_bad,
            # Of several processes each decodes a share, and all use the file.
            cache_file=out / layout.PIXELS if too_large or world_size() > 1 else None,
            progress=go_on,
            with_looks=begins,
        )
    _tell_problems(loaded, config.data.skip_bad, display)
    for text in loaded.report.notes if begins else ():
        display.line(f"note: {text}.")
    dataset = loaded.dataset
    images = {part: hold(pixels, dataset.part(part), device) for part, pixels in loaded.pixels.items()}
    found = frozenset(sample.path for sample in loaded.report.dataset.all_samples())
    return PreparedRun(config, dataset, images, loaded.report.sha256, found, loaded.report.near_duplicates)


def _tell_problems(loaded: LoadedDataSet, skip_bad: bool, display: Display) -> None:
    report = loaded.report
    for problem in report.problems:
        display.line(f"{'note' if problem.is_warning else 'problem'}: {problem}")
    if report.errors and not skip_bad:
        raise UserError(
            f"{report.counted} in {report.dataset.root}, the first: {report.errors[0]}. "
            "Mend them, or train without those files (`likethat train ... --skip-bad`)."
        )
    if skip_bad and report.bad_paths():
        display.line(f"training without {len(report.bad_paths())} bad files")


def prototypes_by_class(config: ModelConfig, dataset: DataSet) -> list[int]:
    """Return how many prototypes each class gets: as many as all, or as the configuration says of some. By their size,
    a class with a quarter of the images that the median class has gets half as many."""
    most, asked = config.prototypes_per_class, config.prototypes_of.strip()
    images = Counter(sample.label for sample in dataset.train)
    if asked == AUTO:
        middle = statistics.median(images.values())
        return [max(1, min(most, round(most * math.sqrt(images[k] / middle)))) for k in range(len(dataset.classes))]
    counts = dict.fromkeys(dataset.classes, most)
    for entry in filter(None, asked.split(",")):
        name, _, number = (text.strip() for text in entry.rpartition("="))
        if name not in counts:
            raise UserError(
                f"--prototypes-of takes CLASS=N, and there is no class '{name or entry}'; look at its name."
            )
        if not number.isdecimal() or not 1 <= int(number) <= most:
            raise UserError(
                f"--prototypes-of gives {name} '{number}' prototypes; name a number from 1 to {most}, or raise "
                "--prototypes-per-class."
            )
        counts[name] = int(number)
    return list(counts.values())


def make_record(prepared: PreparedRun, prototypes_of_class: list[int]) -> RunRecord:
    dataset = prepared.dataset
    skipped = sorted(prepared.found - {sample.path for sample in dataset.all_samples()})
    data = DataRecord(
        root=str(dataset.root),
        kind=dataset.kind,
        classes=dataset.classes,
        counts={part: len(images) for part, images in prepared.images.items()},
        skipped=tuple(skipped),
        fingerprint=fingerprint(dataset, prepared.sha256),
        table=None if dataset.table is None else str(dataset.table),
    )
    return RunRecord(prepared.config, data, tuple(prototypes_of_class))
