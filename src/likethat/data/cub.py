"""CUB-200-2011 in the layout it is published in."""

from pathlib import Path

from likethat.data.dataset import DataSet, Sample, hold_out
from likethat.data.files import read_file
from likethat.errors import UserError


def find_cub(path: Path) -> Path | None:
    """Return the folder with CUB's tables: `path` itself or CUB_200_2011 in it."""
    tables = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    for root in (path, path / "CUB_200_2011"):
        if all((root / table).is_file() for table in tables):
            return root
    return None


def open_cub(root: Path, *, seed: int, full_images: bool, val_fraction: float) -> DataSet:
    """Open CUB's own split, with validation images held out of its training images, cropped to the birds' boxes."""
    class_names = read_table(root / "classes.txt")
    label_of = {class_id: label for label, class_id in enumerate(class_names)}
    class_of = read_table(root / "image_class_labels.txt")
    is_training = read_table(root / "train_test_split.txt")
    boxes = {} if full_images else read_boxes(root / "bounding_boxes.txt")

    train: list[Sample] = []
    test: list[Sample] = []
    for image_id, name in read_table(root / "images.txt").items():
        try:
            label = label_of[class_of[image_id]]
            box = None if full_images else boxes[image_id]
            part = train if is_training[image_id] == "1" else test
        except KeyError as error:
            raise UserError(
                f"{root}: the tables do not agree on image {image_id} ({name}): unpack CUB_200_2011 again"
            ) from error
        part.append(Sample(f"images/{name}", label, box))
    classes = tuple(class_names.values())
    kept, val = hold_out(train, classes, [val_fraction], seed=seed)
    return DataSet(root, "cub", classes, kept, val, tuple(test), held_out=("val",))


def read_boxes(file: Path) -> dict[str, tuple[float, float, float, float]]:
    """Read boxes by image id as x0, y0, x1, y1; the file has x, y, width, height."""
    if not file.is_file():
        raise UserError(
            f"{file} is missing: unpack CUB_200_2011 again, or train on whole pictures with "
            "`likethat train ... --full-images`"
        )
    boxes = {}
    for image_id, line in read_table(file).items():
        try:
            x, y, width, height = map(float, line.split())
        except ValueError as error:
            raise UserError(f"{file}: image {image_id} has no box of four numbers: unpack it again") from error
        boxes[image_id] = (x, y, x + width, y + height)
    return boxes


def read_table(file: Path) -> dict[str, str]:
    """Read a table of 'id value' lines, in the file's order."""
    try:
        text = read_file(file).decode("utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): unpack CUB_200_2011 again") from error
    rows = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, _, value = line.strip().partition(" ")
        if key and not value:
            raise UserError(f"{file}, line {number}: {line!r} is not 'id value': unpack CUB_200_2011 again")
        if key:
            rows[key] = value.strip()
    return rows
