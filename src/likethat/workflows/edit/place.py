"""Where edited runs go: beside the run that was edited or, once pictures were withdrawn, in its place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from likethat.data.folder_kinds import CHECKPOINTS, LOCK, is_run, made_by_likethat
from likethat.errors import UserError
from likethat.runs import layout
from likethat.runs.atomic_files import check_replaceable, whole_folder

# What a run folder has of likethat's own. All of it is made anew or, as it may show pictures, goes.
OURS = {
    *(layout.CONFIG, layout.MODEL, layout.PROTOTYPES, layout.PICTURES, layout.METRICS, layout.EDITS, layout.REPORT),
    *(layout.IMAGES, layout.CALIBRATION, layout.PATH, layout.MANIFEST, layout.NEAR_DUPLICATES, CHECKPOINTS, LOCK),
    *(layout.ATTRIBUTED, layout.CONFUSIONS, *layout.INTERPRETABILITY.values()),
}


def check_out(run: Path, out: Path, *, overwrite: bool) -> None:
    """Refuse to write over the run that is edited, or over what is no run."""
    new, old = out.resolve(), run.resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise UserError(f"Writing {out} would change {run}, which stays as it is; choose another --out.")
    check_replaceable(out, is_run, overwrite=overwrite)


def others_in(run: Path) -> tuple[list[str], list[str]]:
    """Return what else is in a run folder: what likethat made of the run, such as an atlas, and what is the user's."""
    names = sorted(path.name for path in run.iterdir() if path.name not in OURS)
    ours = [name for name in names if made_by_likethat(run / name)]
    return ours, [name for name in names if name not in ours]


@contextmanager
def edited_folder(run: Path, out: Path, *, overwrite: bool, withdrawn: bool) -> Iterator[Path]:
    """Provide a folder to write the edited run into. Where it takes the run's own place, nothing of likethat's stays
    there that shows pictures; files of the user's do."""
    if not (withdrawn and out.resolve() == run.resolve()):
        check_out(run, out, overwrite=overwrite)
        with whole_folder(out, is_run, overwrite=overwrite) as target:
            yield target
        return
    with whole_folder(out, is_run, overwrite=True) as target:
        yield target
        for name in others_in(run)[1]:
            if (run / name).is_dir() and not (run / name).is_symlink():
                shutil.copytree(run / name, target / name, symlinks=True)
            else:
                shutil.copy2(run / name, target / name, follow_symlinks=False)
