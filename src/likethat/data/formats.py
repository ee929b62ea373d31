"""Opens a data set, whatever its format. A new format adds a line to FORMATS."""

from dataclasses import replace
from pathlib import Path

from likethat.config.settings import ANY_VALUES, Config
from likethat.data.cars import find_cars, open_cars
from likethat.data.cub import find_cub, open_cub
from likethat.data.dataset import DataSet, Sample
from likethat.data.folder import open_folder
from likethat.data.reading.values import Range
from likethat.data.tables.rows import ENDINGS
from likethat.data.tables.table import find_table, open_table
from likethat.errors import UserError

# Of each format that comes with lists of its own: what finds its root in a folder, if it is there, and what opens it.
FORMATS = ((find_cub, open_cub), (find_cars, open_cars))


def is_benchmark(root: Path) -> bool:
    """Tell whether a folder holds a data set with lists of its own, and not just pictures."""
    return any(find(root) for find, _ in FORMATS)


def open_by_config(path: str | Path, config: Config, *, strict: bool = True) -> DataSet:
    """Open a data set as a run's configuration says. Where `strict` is False, a table may have the usual columns in
    place of those that the configuration names."""
    data = config.data
    return open_dataset(
        path,
        seed=config.train.seed,
        full_images=data.full_images,
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        columns=data.columns,
        images=data.images,
        value_range=stated_range(config),
        strict=strict,
    )


def stated_range(config: Config) -> Range | None:
    """Return the values that become black and white, where the configuration states them."""
    return None if config.data.value_range == ANY_VALUES else config.data.value_range


def open_dataset(
    path: str | Path,
    *,
    seed: int = 0,
    full_images: bool = False,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    columns: str = "",
    images: str = "",
    value_range: Range | None = None,
    strict: bool = True,
) -> DataSet:
    """Read an image folder, a table, CUB-200-2011 or Stanford Cars; parts that are missing are held out of the training
    images.

    `full_images` leaves the pictures whole where the data set has boxes to crop to. `columns`, `images` and `strict`
    are about tables, see `open_table`.
    """
    if not (val_fraction > 0 and test_fraction > 0 and val_fraction + test_fraction < 1):
        raise UserError(
            f"val_fraction {val_fraction} and test_fraction {test_fraction} must be above 0 and together below 1"
        )
    root = Path(path).expanduser().resolve()
    if not root.exists():
        raise UserError(f"{path} does not exist: give the folder that holds the images, or a table that lists them")
    if table := find_table(root):
        return open_table(
            table,
            seed=seed,
            full_images=full_images,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            columns=columns,
            images=images,
            value_range=value_range,
            strict=strict,
        )
    if not root.is_dir():
        raise UserError(
            f"{path} is a file: give the folder that holds the images (unpack it first if it is an archive), or a "
            f"table that lists them ({', '.join(ENDINGS)})"
        )
    for find, open_found in FORMATS:
        if found := find(root):
            dataset = open_found(found, seed=seed, full_images=full_images, val_fraction=val_fraction)
            break
    else:
        dataset = open_folder(root, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
    return dataset if value_range is None else _with_range(dataset, value_range)


def _with_range(dataset: DataSet, value_range: Range) -> DataSet:
    def of(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        return tuple(replace(sample, value_range=value_range) for sample in samples)

    return replace(dataset, train=of(dataset.train), val=of(dataset.val), test=of(dataset.test))
