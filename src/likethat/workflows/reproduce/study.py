"""The study from end to end: runs what is missing and keeps the table up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from likethat.config.presets import resolve
from likethat.config.settings import options as known_options
from likethat.data.folder_kinds import TABLE
from likethat.data.formats import open_by_config
from likethat.errors import UserError
from likethat.progress import Display
from likethat.runs.atomic_files import write_json, write_text
from likethat.runtime import resolve_device, stop_on_signals
from likethat.workflows.reproduce import OWN_OPTIONS
from likethat.workflows.reproduce.picture import draw_table
from likethat.workflows.reproduce.plan import Study, check_study, make_tasks
from likethat.workflows.reproduce.schedule import Times, load_times, run_tasks
from likethat.workflows.reproduce.table import gather, to_document, to_markdown


def reproduce(
    data: str | Path,
    backbones: Sequence[str],
    out: str | Path,
    *,
    weights: Sequence[str] = (),
    seeds: int = 3,
    presets: Sequence[str] = ("default",),
    full_images: bool = False,
    as_long: bool = True,
    interpretability: str = "",
    jobs: int = 1,
    device: str = "auto",
    config_file: Path | None = None,
    display: Display | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the baseline and a ProtoPNet of each preset for every backbone and seed, prune and combine them, and
    return the table of their figures. Called again, go on with what is missing.

    `options` are those of training, for all runs; without `weights` each preset has its own. `full_images` adds whole
    pictures to the cropped ones. `as_long` adds a baseline with the stages, views, targets and epochs of each preset.
    `interpretability` adds a table of how good the explanations are, measured on the part "val" or "test" of the data.
    """
    display, out = display or Display(quiet=True), Path(out).resolve()
    if seeds < 1 or jobs < 1:
        raise UserError("--seeds and --jobs must be at least 1.")
    if len(weights) not in (0, 1, len(backbones)):
        raise UserError(
            f"--weights takes one entry for each of the {len(backbones)} backbones, in their order, or one for all; "
            f"these are {len(weights)}."
        )
    if wrong := [name for name in OWN_OPTIONS if name in options]:
        raise UserError(f"A study sets {wrong[0]} for each of its runs; leave it out.")
    about_data = {
        name: options[name]
        for name, (section, _, _) in known_options().items()
        if section == "data" and name in options
    }
    dataset = open_by_config(data, resolve("default", config_file, **about_data))
    study = Study(
        data=str(data),
        has_boxes=any(sample.box is not None for sample in dataset.all_samples()),
        out=out,
        backbones=tuple(backbones),
        weights=tuple(weights) if len(weights) == len(backbones) else tuple(weights) * len(backbones),
        seeds=tuple(range(seeds)),
        presets=tuple(presets),
        views=(False, True) if full_images else (False,),
        as_long=as_long,
        interpretability=interpretability,
        device=device,
        config_file=config_file,
        options=options,
    )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out.")
    resolve_device(device)
    check_study(study)
    tasks, times = make_tasks(study), load_times(out)
    done = sum(task.is_done(out) for task in tasks)
    display.line(f"{len(tasks)} runs, {done} of them finished; the table is {out / TABLE}.md")

    def write(failures: Mapping[str, str]) -> dict[str, Any]:
        return _write_table(study, failures, times)

    write({})
    with stop_on_signals() as stop:
        failures = run_tasks(tasks, out, jobs, times, display, stop, write)
    return write(failures)


def _write_table(study: Study, failures: Mapping[str, str], times: Times) -> dict[str, Any]:
    """Replace each file as a whole, so that a reader always finds one that is complete in itself."""
    rows = gather(study, times)
    document = to_document(study, rows, failures, times)
    write_json(study.out / f"{TABLE}.json", document)
    write_text(study.out / f"{TABLE}.md", to_markdown(study, rows, failures, times))
    write_text(study.out / f"{TABLE}.svg", draw_table(study, rows))
    return document
