"""The model in one file for other runtimes: what `likethat export` does."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch import Tensor, nn

from likethat import __version__
from likethat.data.loaders import to_unit
from likethat.errors import UserError
from likethat.explaining.boxes import PERCENTILE, margin_of
from likethat.explaining.draw.render import read_picture
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import atomic_path
from likethat.runs.classifier import Classifier, PreparedPicture, load
from likethat.runs.data import open_run_data

FORMATS = ("onnx", "torch")
INPUT, OUTPUTS = "pictures", ("logits", "scores", "maps", "distances")
METADATA = "likethat"  # key of the ONNX file's metadata; in a torch file, likethat.json beside the program
LIMIT = 1e-4  # largest difference to PyTorch that is taken for rounding; of outputs above 1, as a share of the largest
CHECKED = 8  # pictures

Run = Callable[[Tensor], Sequence[Tensor]]


class Exported(nn.Module):
    """Pictures in [0, 1] to plain tensors, in the order of OUTPUTS."""

    def __init__(self, network: ProtoPNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = self.network(pictures)
        return output.logits_BK, output.score_BP, output.similarity_BPHW, output.distance_BPHW


def export(
    run: str | Path, out: str | Path, format: str, *, data: str | None = None, display: Display | None = None
) -> dict[str, Any]:
    """Write the file, once it gives what PyTorch gives for real pictures. Otherwise write none."""
    run, out, display = Path(run), Path(out), display or Display(quiet=True)
    if format not in FORMATS:
        raise UserError(f"A run is exported as {' or '.join(FORMATS)}, not as {format}.")
    if layout.read_record(run).kind == layout.COMBINED:
        raise UserError(
            f"{run} is a combined run; export each of its members ({run / layout.MEMBERS / '0'} and so on) and add "
            "their logits."
        )
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file with --out.")
    if format == "onnx":
        _import_onnx()
    classifier = load(run, "cpu")
    pictures, origin = real_pictures(classifier, data)
    document = json.dumps(describe(classifier))
    with atomic_path(out) as temporary:
        with display.task(f"exporting to {format}") as advance:
            _write(classifier.networks[0], temporary, format, document)
            advance(1, 2)
            difference, passed = _largest_differences(classifier, pictures, _open(temporary, format))
            advance(2, 2)
        if not passed:
            raise CheckFailed(difference, origin)
        size = temporary.stat().st_size
    return {
        "file": str(out),
        "format": format,
        "bytes": size,
        "pictures": len(pictures),
        "from": origin,
        "max_difference": difference,
    }


class CheckFailed(Exception):
    """The exported model differs from PyTorch by more than rounding."""

    def __init__(self, difference: dict[str, float], origin: str) -> None:
        found = ", ".join(f"{name} {value:.1e}" for name, value in difference.items())
        super().__init__(f"the exported model differs from PyTorch on {origin}: {found}; no file was written")
        self.difference = difference


def describe(classifier: Classifier) -> dict[str, Any]:
    """Return all that an explanation needs besides the outputs."""
    network = classifier.networks[0]
    weights = [
        [[p, weight] for p, weight in enumerate(row) if weight] for row in classifier.weight_KP.double().tolist()
    ]
    return {
        "format": 1,
        "likethat": __version__,
        "run": classifier.path.resolve().name,
        "classes": list(classifier.classes),
        "preprocessing": {
            "input": INPUT,
            "size": list(network.backbone.input_size),  # height, width; the aspect is not kept
            "resize": "bilinear, antialiased",
            "channels": "RGB",
            "scale": 1 / 255,
            # Values that become 0 and 255 first, of pictures of more than 8 bits; null: by the kind of the file.
            "value_range": classifier.value_range,
            "mean": network.backbone.mean.flatten().tolist(),  # subtracted and divided by inside the model
            "std": network.backbone.std.flatten().tolist(),
        },
        "percentile": PERCENTILE,  # of the boxes around the most active pixels of a map
        "margin": list(margin_of(network)),  # pixels, along y and along x, that such a box has around it
        # Size and stride in pixels, where a cell of a map has seen one window of the picture: that is its box.
        "windows": None if (windows := network.backbone.windows) is None else [windows.size, windows.stride],
        "connections": weights,  # of each class: prototype and weight, where it is not zero
        "prototypes": [
            {
                "id": prototype.id,
                "name": prototype.name,
                "class": prototype.class_name,
                "path": prototype.path,
                "sha256": prototype.sha256,
                "row": prototype.row,
                "column": prototype.column,
                "box": list(prototype.box),
            }
            for prototype in classifier.prototypes
        ],
    }


def real_pictures(classifier: Classifier, data: str | None) -> tuple[list[PreparedPicture], str]:
    """Return test images spread over the classes; where the data is gone, the pictures that prototypes come from."""
    if data is None and not layout.read_record(classifier.path).data.source.exists():
        names = sorted({prototype.source for prototype in classifier.prototypes})[:CHECKED]
        # Mirrored, because on the very patch of a prototype the log similarity blows any rounding up.
        mirrored = [ImageOps.mirror(read_picture(classifier.path, name)) for name in names]
        return [classifier.prepare(picture) for picture in mirrored], "mirrored pictures of prototypes"
    dataset = open_run_data(classifier, data)
    spread = torch.linspace(0, len(dataset.test) - 1, CHECKED).long().unique().tolist()
    samples = [dataset.test[number] for number in spread]
    return [classifier.prepare(dataset.root / sample.path, sample.box) for sample in samples], "test images"


def _import_onnx() -> Any:
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("Exporting to ONNX needs more packages; `pip install 'likethat[export]'`.") from error
    return onnx


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters, which tell about their own workings; the check afterwards is what counts."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write(network: ProtoPNet, path: Path, format: str, document: str) -> None:
    # The exporters want every tensor in the order of its dimensions.
    model = Exported(copy.deepcopy(network).to(memory_format=torch.contiguous_format)).eval()
    example = torch.zeros(2, 3, *network.backbone.input_size)  # one picture would fix the batch at one
    shapes = {"pictures": {0: torch.export.Dim("batch")}}
    try:
        with torch.no_grad(), _quiet():
            if format == "torch":
                program = torch.export.export(model, (example,), dynamic_shapes=shapes)
                whole = io.BytesIO()  # torch would end the process where the disk is full
                torch.export.save(program, whole, extra_files={f"{METADATA}.json": document})
                path.write_bytes(whole.getbuffer())
                return
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": list(OUTPUTS), "dynamic_shapes": shapes}
            exported = torch.onnx.export(model, (example,), **names, dynamo=True, verbose=False)
    except OSError:
        raise
    except Exception as error:  # the exporters raise many kinds; each means that they do not know some operation
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"torch cannot export {network.backbone.name} as {format} ({reason}); try the other --format."
        ) from error
    assert exported is not None
    proto = exported.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, document
    _import_onnx().save(proto, str(path))


def _open(path: Path, format: str) -> Run:
    """Open the file as its users run it."""
    if format == "torch":
        with path.open("rb") as file:
            module = torch.export.load(file).module()
        return lambda x_B3HW: module(x_B3HW)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x_B3HW: [torch.from_numpy(value) for value in session.run(None, {INPUT: x_B3HW.numpy()})]


@torch.no_grad()
def _largest_differences(
    classifier: Classifier, pictures: Sequence[PreparedPicture], run: Run
) -> tuple[dict[str, float], bool]:
    """Return each output's largest difference, over batches of one and of all others, and whether it is rounding."""
    difference, largest = dict.fromkeys(OUTPUTS, 0.0), dict.fromkeys(OUTPUTS, 1.0)
    original = Exported(classifier.networks[0]).eval()
    for batch in (pictures[:1], pictures[1:]):
        if batch:
            x_B3HW = to_unit(torch.stack([picture.pixels[0] for picture in batch]))
            for name, expected, found in zip(OUTPUTS, original(x_B3HW), run(x_B3HW), strict=True):
                assert found.shape == expected.shape
                difference[name] = max(difference[name], float((found - expected).abs().max()))
                largest[name] = max(largest[name], float(expected.abs().max()))
    return difference, all(difference[name] <= LIMIT * largest[name] for name in OUTPUTS)
