"""From a folder of images to a finished run folder: what `likethat train` and `likethat.train` do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat import run_dir
from likethat.calibration import calibrate, write_calibration
from likethat.checkpoint import save_tensors
from likethat.classifier import Classifier, load
from likethat.config import AUTO_WIDTH, Config, resolve
from likethat.data.cache import LoadedDataSet, load_dataset
from likethat.data.dataset import DataSet, fingerprint, open_dataset
from likethat.data.loaders import Images, hold
from likethat.distributed import barrier, is_first, world
from likethat.errors import UserError
from likethat.explaining.explanation import Explanation, explain_batch
from likethat.explaining.gallery import draw_prototypes, save_prototypes
from likethat.metrics.accuracy import Evaluation, evaluate_logits
from likethat.models.backbone import place
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet, create_protopnet
from likethat.plain import check_classifier, read_classifier
from likethat.progress import Display
from likethat.report.html import write_report
from likethat.run_dir import DataRecord, RunRecord
from likethat.runtime import StopFlag, exact_arithmetic, physical_memory, resolve_device, seed_for, stop_on_signals
from likethat.tensorboard import tensorboard_observer
from likethat.training.course import Course
from likethat.training.engine import classify_images, latents_of, logits_by, measure, own_batches_of
from likethat.training.loop import fit
from likethat.training.state import RunState, write_metrics

MEMORY_SHARE = 0.4  # of the machine's memory that decoded pictures may take; beyond it they stay on disk
EXPLAINED = 4  # test images in the report


@dataclass(frozen=True)
class Prepared:
    """What training starts from."""

    config: Config
    dataset: DataSet
    images: dict[str, Images]
    sha256: Mapping[str, str]
    found: frozenset[str]  # every file of the data set, the bad ones that are left out included


def train(
    data: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    config_file: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    tensorboard: bool = False,
    display: Display | None = None,
    **options: Any,
) -> Classifier:
    """Trains on an image folder, CUB_200_2011 or Stanford Cars, and leaves a finished run folder at `out`.

    `options` are the names that `likethat train --help` lists, such as backbone="resnet34".
    """
    out, display = Path(out), display or Display(quiet=True)
    torch_device = resolve_device(device)
    exact_arithmetic()
    config = resolve(preset, config_file, **options)
    saved = open_out(out, config, run_dir.PROTOPNET, resume=resume, overwrite=overwrite)
    if saved is not None and run_dir.is_finished(out):
        display.line(f"{out} is finished already.")
        return load(out, device)
    if saved is not None and (out / run_dir.STATE).is_file():
        config, classifier = replace(config, train=saved.config.train), ""  # read already, wherever it is now
    else:
        classifier = config.train.from_classifier
    if classifier:
        check_classifier(Path(classifier), config.model, display)
    with stop_on_signals() as stop:
        prepared = prepare(Path(data), out, config, torch_device, display, stop)
        record = make_record(prepared, [config.model.prototypes_per_class] * len(prepared.dataset.classes))
        check_same_images(saved, record, out)
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        weights = "none" if config.train.from_classifier else config.model.weights
        model = place(create_protopnet(config.model, list(record.prototypes_of_class), weights=weights), torch_device)
        plain = None
        if config.train.has_classifier:
            plain = PlainClassifier(model.backbone, len(record.data.classes)).to(torch_device)
            if classifier:
                read_classifier(plain, Path(classifier), record)
        begin(out, record, saved)
        _describe(prepared, model, torch_device, display)
        train_images, val_images = prepared.images["train"], prepared.images["val"]
        observe = tensorboard_observer(out) if tensorboard and is_first() else None
        classes = prepared.dataset.classes
        course = Course(train_images, val_images, classes, config, out, display, stop, observe)
        state = fit(model, plain, course)
        if config.model.latent_width == AUTO_WIDTH and is_first():
            with_chosen_width(record, model).write(out)
        return finish(out, model, state, prepared, display)


def with_chosen_width(record: RunRecord, model: ProtoPNet) -> RunRecord:
    """A finished run says which width it has, and that the choice was its own."""
    settings = replace(record.config.model, latent_width=model.prototype_layer.prototype_PDhw.shape[1])
    return replace(record, config=replace(record.config, model=settings), automatic=("latent_width",))


def open_out(out: Path, config: Config, kind: str, *, resume: bool, overwrite: bool) -> RunRecord | None:
    """Looks whether the run may go there; gives what a run that goes on was begun with."""
    saved = run_dir.read_record(out) if resume and (out / run_dir.CONFIG).is_file() else None
    if saved is not None:
        if saved.kind != kind:
            raise UserError(f"{out} holds a {saved.kind} run, not one of this command's; choose another --out.")
        check_same_config(saved, config)
    run_dir.check_out(out, overwrite=overwrite, resume=resume)
    barrier()  # so that no process takes what another one begins for an earlier run
    return saved


def begin(out: Path, record: RunRecord, saved: RunRecord | None) -> None:
    """An earlier run is removed only now that images and weights are known to be good."""
    barrier()
    if is_first():
        if saved is None:
            run_dir.clear_out(out)
        record.write(out)
    barrier()
    if not (out / run_dir.CONFIG).is_file():
        raise UserError(f"Not every process sees {out}; choose an --out on a disk that all machines share.")


def check_same_images(saved: RunRecord | None, now: RunRecord, run: Path) -> None:
    if saved is not None and saved.data.fingerprint != now.data.fingerprint:
        raise UserError(
            f"The images under {now.data.root} are not those that {run} was begun with; restore them or start a new "
            "run."
        )


def prepare(
    data: Path, out: Path, config: Config, device: torch.device, display: Display, stop: StopFlag | None = None
) -> Prepared:
    """Reads, checks and decodes every image once; stops with all problems told when there are any."""
    dataset = open_dataset(
        data,
        seed=config.train.seed,
        full_images=config.data.full_images,
        val_fraction=config.data.val_fraction,
        test_fraction=config.data.test_fraction,
    )
    barrier()  # so that no process takes what another one begins among the images for a class
    height, width = config.model.input_size
    too_large = len(dataset.all_samples()) * height * width * 3 > MEMORY_SHARE * physical_memory()
    with display.task("reading images") as advance:

        def go_on(done: int, total: int) -> None:
            advance(done, total)
            if stop is not None:
                stop.check()

        loaded = load_dataset(
            dataset,
            config.model.input_size,
            skip_bad=config.data.skip_bad,
            # Of several processes each decodes a share, and all use the file.
            cache_file=out / run_dir.PIXELS if too_large or world() > 1 else None,
            progress=go_on,
        )
    _tell_problems(loaded, config.data.skip_bad, display)
    dataset = loaded.dataset
    images = {part: hold(pixels, dataset.part(part), device) for part, pixels in loaded.pixels.items()}
    found = frozenset(sample.path for sample in loaded.report.dataset.all_samples())
    return Prepared(config, dataset, images, loaded.report.sha256, found)


def _tell_problems(loaded: LoadedDataSet, skip_bad: bool, display: Display) -> None:
    report = loaded.report
    for problem in report.problems:
        display.line(f"{'note' if problem.is_warning else 'problem'}: {problem}")
    if report.errors and not skip_bad:
        raise UserError(
            f"{len(report.errors)} problems in {report.dataset.root}, the first: {report.errors[0]}. "
            "Mend them, or train without those files (`likethat train ... --skip-bad`)."
        )
    if skip_bad and report.bad_paths():
        display.line(f"training without {len(report.bad_paths())} bad files")


def check_same_config(saved: RunRecord, asked: Config) -> None:
    """A resumed run keeps its configuration; what is asked for now must not contradict it."""
    if asked.model.latent_width == AUTO_WIDTH and "latent_width" in saved.automatic:
        asked = replace(asked, model=replace(asked.model, latent_width=saved.config.model.latent_width))
    if asked.train.from_classifier and saved.config.train.from_classifier:  # which may have been moved
        asked = replace(asked, train=replace(asked.train, from_classifier=saved.config.train.from_classifier))
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


def make_record(prepared: Prepared, prototypes_of_class: list[int]) -> RunRecord:
    dataset = prepared.dataset
    skipped = sorted(prepared.found - {sample.path for sample in dataset.all_samples()})
    data = DataRecord(
        root=str(dataset.root),
        kind=dataset.kind,
        classes=dataset.classes,
        counts={part: len(images) for part, images in prepared.images.items()},
        skipped=tuple(skipped),
        fingerprint=fingerprint(dataset, prepared.sha256),
    )
    return RunRecord(prepared.config, data, tuple(prototypes_of_class))


def _describe(prepared: Prepared, model: ProtoPNet, device: torch.device, display: Display) -> None:
    counts = ", ".join(f"{len(images)} {part}" for part, images in prepared.images.items())
    height, width = model.backbone.map_size
    display.line(
        f"{len(prepared.dataset.classes)} classes, images: {counts}. {model.backbone.name} on {device}, "
        f"{height}x{width} map, {len(model.prototype_layer.class_P)} prototypes."
    )


def finish(out: Path, model: ProtoPNet, state: RunState, prepared: Prepared, display: Display) -> Classifier:
    """Model, prototypes, test accuracy (looked at here for the first and only time) and report."""
    assert state.best_projection is not None
    dataset, test = prepared.dataset, prepared.images["test"]
    layer = model.prototype_layer
    heads = [(layer, model.last_layer.weight)]
    if state.best_unsolved_KP is not None:
        # For reading only: what projection and last layer did to the accuracy, which the run told on validation images.
        unsolved_KP = state.best_unsolved_KP.to(test.device)
        before = layer.with_prototypes(layer.unprojected_PDhw.flatten(1), layer.class_P)
        heads += [(before, unsolved_KP), (layer, unsolved_KP)]
    with display.task("test images") as advance:
        latents = latents_of(model, own_batches_of(test, advance))
        logits_NK, *unsolved = logits_by(heads, latents, len(test), test.device)
    val_NK = classify_images(model, prepared.images["val"])
    metrics = state.metrics
    if unsolved:
        measured = [measure(unsolved_NK, test.label_N) for unsolved_NK in unsolved]
        metrics = [*metrics, {"stage": "test_projection", "before": measured[0], "after": measured[1]}]
    if not is_first():
        barrier()
        return load(out, str(test.device))
    save_tensors(out / run_dir.MODEL, model.state_dict())
    sources = (dataset.train, dataset.root, prepared.sha256, dataset.classes)
    with display.task("pictures of prototypes") as advance:
        save_prototypes(out, draw_prototypes(out, model, state.best_projection, *sources, advance))
    classifier, evaluation = conclude(out, metrics, dataset, logits_NK, val_NK)
    run_dir.drop_checkpoints(out)
    barrier()
    display.line(f"test accuracy {evaluation.accuracy:.1%} on {evaluation.images} images")
    return classifier


def conclude(
    run: Path, metrics: list[dict[str, Any]], dataset: DataSet, logits_NK: Tensor, val_NK: Tensor | None
) -> tuple[Classifier, Evaluation]:
    """Calibration, test accuracy, metrics.jsonl and report of a run whose models and prototypes are written.

    `logits_NK` are those of the test images, `val_NK` those of the validation images, if there are any that no network
    of the run was trained on.
    """
    if val_NK is not None and len(val_NK):
        write_calibration(run, calibrate(val_NK, torch.tensor([sample.label for sample in dataset.val])))
    label_N = torch.tensor([sample.label for sample in dataset.test], device=logits_NK.device)
    evaluation = evaluate_logits(logits_NK, label_N, dataset.classes, "test")
    write_metrics(run, [*metrics, {"stage": "test", **evaluation.to_dict()}])
    classifier = load(run, str(logits_NK.device))
    write_report(run, classifier, explain_some(classifier, dataset, logits_NK))
    return classifier, evaluation


def explain_some(classifier: Classifier, dataset: DataSet, logits_NK: Tensor) -> list[Explanation]:
    """A few test images spread over the classes, and one that the model got wrong where there is one."""
    labels = torch.tensor([sample.label for sample in dataset.test])
    wrong = (logits_NK.argmax(1).cpu() != labels).nonzero()[:, 0].tolist()[:1]
    spread = torch.linspace(0, len(labels) - 1, EXPLAINED - len(wrong)).long().tolist()
    chosen = [dataset.test[number] for number in dict.fromkeys(spread + wrong)]
    prepared = [classifier.prepare(dataset.root / sample.path, sample.box) for sample in chosen]
    return explain_batch(classifier, prepared, paths=[sample.path for sample in chosen])
