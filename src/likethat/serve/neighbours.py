"""The search for every prototype's nearest patches, started from the page where `likethat atlas` was not run before."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from likethat.explaining.atlas import check_unchanged, make_atlas
from likethat.progress import Display
from likethat.report.atlas import write_atlas
from likethat.runs.classifier import Classifier
from likethat.runs.data import open_run_data
from likethat.serve.catalogue import ATLAS, Catalogue, read_atlas
from likethat.serve.work import Work

K = 5  # neighbours of each prototype


class Neighbours:
    """Holds the catalogue of the served run. What is found is kept beside the run, for as long as the server runs."""

    def __init__(self, classifier: Classifier, data: str | None) -> None:
        self.classifier, self.data = classifier, data
        self.catalogue = self._catalogue(classifier.path / ATLAS)
        self.work = Work()
        self.thread = ThreadPoolExecutor(1, "neighbours")
        self.scratch: tempfile.TemporaryDirectory[str] | None = None

    def _catalogue(self, folder: Path) -> Catalogue:
        return Catalogue(self.classifier, read_atlas(folder, self.classifier), folder)

    def search(self) -> None:
        if not self.catalogue.atlas:
            self.work.start(self.thread, self._search)

    def _search(self, display: Display) -> None:
        dataset = open_run_data(self.classifier, self.data)
        check_unchanged(self.classifier, dataset)
        atlas = make_atlas(self.classifier, dataset, K, display)
        self.scratch = self.scratch or tempfile.TemporaryDirectory(prefix="likethat-atlas-")
        folder = Path(tempfile.mkdtemp(dir=self.scratch.name))
        with display.task("drawing") as advance:
            write_atlas(folder, atlas, advance)
        self.catalogue = self._catalogue(folder)

    def close(self) -> None:
        self.work.stop()
        self.thread.shutdown(wait=True, cancel_futures=True)
        if self.scratch:
            self.scratch.cleanup()
