"""Opens a data set, whatever its format. A new format adds a line to FORMATS."""

from pathlib import Path

from likethat.data.cars import find_cars, open_cars
from likethat.data.cub import find_cub, open_cub
from likethat.data.dataset import DataSet
from likethat.data.folder import open_folder
from likethat.errors import UserError

# Of each format that comes with lists of its own: what finds its root in a folder, if it is there, and what opens it.
FORMATS = ((find_cub, open_cub), (find_cars, open_cars))


def is_benchmark(root: Path) -> bool:
    """Tell whether a folder holds a data set with lists of its own, and not just pictures."""
    return any(find(root) for find, _ in FORMATS)


def open_dataset(
    path: str | Path,
    *,
    seed: int = 0,
    full_images: bool = False,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
) -> DataSet:
    """Read an image folder, CUB-200-2011 or Stanford Cars; parts that are missing are held out of the training images.

    `full_images` leaves the pictures whole where the data set has boxes to crop to.
    """
    if not (val_fraction > 0 and test_fraction > 0 and val_fraction + test_fraction < 1):
        raise UserError(
            f"val_fraction {val_fraction} and test_fraction {test_fraction} must be above 0 and together below 1"
        )
    root = Path(path).expanduser().resolve()
    if not root.exists():
        raise UserError(f"{path} does not exist: give the folder that holds the images")
    if not root.is_dir():
        raise UserError(
            f"{path} is a file: give the folder that holds the images (unpack it first if it is an archive)"
        )
    for find, open_found in FORMATS:
        if found := find(root):
            return open_found(found, seed=seed, full_images=full_images, val_fraction=val_fraction)
    return open_folder(root, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
