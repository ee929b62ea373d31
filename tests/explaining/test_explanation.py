"""Explanations: what they say must be what the network computed, and boxes must lie where the file has the pixels."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.explain_run import BORDER, CELL_HW, MAP_HW, TO_STORED, TinyRun, grid_picture, make_run
from PIL import Image

from likethat.data.reading import workers
from likethat.errors import UserError
from likethat.explaining.draw.render import scaled
from likethat.explaining.explanation import Options, explain, explain_batch
from likethat.explaining.scoring import overlap
from likethat.runs.classifier import Classifier, Prototype, load, read_prototypes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def classifier(run: TinyRun) -> Classifier:
    return load(run.path, "cpu")


@pytest.fixture(scope="module")
def picture(run: TinyRun) -> Path:
    return run.root / run.samples[0].path


def combined(first: TinyRun, second: TinyRun) -> Classifier:
    """Two runs as one; pictures are named by their full paths, since they lie in two folders."""

    def of(run: TinyRun, member: int, start: int) -> list[Prototype]:
        return [
            replace(p, id=start + p.id, member=member, crop=str(run.path / p.crop), source=str(run.path / p.source))
            for p in run.prototypes
        ]

    prototypes = of(first, 0, 0) + of(second, 1, len(first.prototypes))
    return Classifier(first.path, first.classes, [first.model, second.model], prototypes)


def test_sheets_hold_every_connection_and_add_up_to_the_logits(classifier: Classifier, picture: Path) -> None:
    explanation = explain(classifier, picture)
    prepared = classifier.prepare(picture)
    with torch.inference_mode():
        output = classifier.networks[0](prepared.pixels[0][None].float() / 255)
    logits, scores = output.logits_BK[0].double(), output.score_BP[0].tolist()
    order = logits.argsort(descending=True).tolist()
    assert [sheet.name for sheet in explanation.classes] == [classifier.classes[label] for label in order]
    for sheet in explanation.classes:
        label = classifier.classes.index(sheet.name)
        weights = classifier.weight_KP[label].tolist()
        assert {row.match.prototype.id: row.weight for row in sheet.rows} == {p: w for p, w in enumerate(weights) if w}
        for row in sheet.rows:
            assert row.match.similarity == pytest.approx(scores[row.match.prototype.id], abs=1e-6)
            assert row.match.similarity == pytest.approx(float(row.match.map_HW.max()), abs=1e-6)
            assert row.points == row.match.similarity * row.weight
        points = [row.points for row in sheet.rows]
        assert points == sorted(points, reverse=True)
        assert min(points) < 0 < max(points)
        assert sheet.logit == pytest.approx(float(logits[label]), abs=1e-6)
        assert abs(sum(points) - sheet.logit) <= 1e-4 * max(1, abs(sheet.logit))
        assert sheet.probability == pytest.approx(float(logits.softmax(0)[label]), abs=1e-9)
    assert explanation.predicted.name == classifier.predict(picture).class_name


def test_points_that_do_not_add_up_are_never_shown(run: TinyRun, picture: Path) -> None:
    classifier = load(run.path, "cpu")
    classifier.networks[0].register_forward_hook(
        lambda _, __, output: replace(output, logits_BK=output.logits_BK + 0.01)
    )
    with pytest.raises(AssertionError, match="points differ from the logit"):
        explain(classifier, picture)


def test_groups_add_up_to_the_logit_whole_or_shortened(tmp_path: Path) -> None:
    run = make_run(tmp_path, per_class=6, nonzero=0.6)
    explanation = explain(load(run.path, "cpu"), run.root / run.samples[0].path)
    sheets = [*explanation.classes, explanation.lead(*(sheet.name for sheet in explanation.classes[:2]))]
    assert any(len(group.rows) > 1 for sheet in sheets for group in sheet.groups), "nothing was put to the test"
    for sheet in sheets:
        grouped = [row for group in sheet.groups for row in group.rows]
        assert {id(row) for row in grouped} == {id(row) for row in sheet.rows}
        assert len(grouped) == len(sheet.rows), "each row once"
        assert sum(group.points for group in sheet.groups) == pytest.approx(sheet.logit, abs=1e-4)
        sizes = [abs(group.points) for group in sheet.groups]
        assert sizes == sorted(sizes, reverse=True), "strongest first"
        for group in sheet.groups:
            assert len({row.match.prototype.class_name for row in group.rows}) == 1
            assert len({row.points < 0 for row in group.rows}) == 1
            assert abs(group.lead.points) == max(abs(row.points) for row in group.rows)
            for row in group.rows:
                assert row is group.lead or overlap(row.match.share, group.lead.match.share) >= 0.5
        for group, other in combinations(sheet.groups, 2):
            leads = group.lead.match, other.lead.match
            same_kind = leads[0].prototype.class_name == leads[1].prototype.class_name
            if same_kind and (group.points < 0) == (other.points < 0):
                assert overlap(leads[0].share, leads[1].share) < 0.5, "these two say the same"
        shown, others, rest = sheet.main_groups(2)
        assert shown == sheet.groups[:2]
        assert others == sum(len(group.rows) for group in sheet.groups[2:])
        assert sum(group.points for group in shown) + rest == pytest.approx(sheet.logit, abs=1e-4)
    document = explanation.to_dict()["classes"][0]["groups"]
    assert [entry["points"] for entry in document] == [group.points for group in explanation.predicted.groups]
    assert [entry["prototypes"] for entry in document] == [
        [row.match.prototype.id for row in group.rows] for group in explanation.predicted.groups
    ]
    assert document[0]["box"] == list(explanation.predicted.groups[0].lead.match.box)


def test_nearest_prototypes_are_those_with_the_highest_similarity(classifier: Classifier, picture: Path) -> None:
    explanation = explain(classifier, picture, top_classes=1)
    scores = classifier.outputs([classifier.prepare(picture)])[0].score_BP[0]
    assert [match.prototype.id for match in explanation.nearest] == scores.argsort(descending=True).tolist()[:10]


def test_document_survives_json(classifier: Classifier, picture: Path) -> None:
    explanation = explain(classifier, picture, top_classes=2)
    document = json.loads(json.dumps(explanation.to_dict(maps=True)))
    assert set(document) == {
        *("path", "predicted", "attribution", "classes", "nearest", "maps"),
        *("against", "difference", "difference_groups"),
    }
    assert document["path"] == str(picture)
    assert len(document["classes"]) == 2
    for entry in document["classes"]:
        assert set(entry) == {"name", "logit", "probability", "rows", "groups"}
        for row in entry["rows"]:
            assert set(row) == {*"prototype name similarity weight points box attribution source".split()}
            assert set(row["source"]) == {"path", "class", "box"}
            map_HW = document["maps"][str(row["prototype"])]
            assert (len(map_HW), len(map_HW[0])) == MAP_HW
            assert max(map(max, map_HW)) == pytest.approx(row["similarity"], abs=1e-6)
    assert "maps" not in explanation.to_dict()


def test_comparison_adds_up_to_the_lead(classifier: Classifier, picture: Path) -> None:
    order = [sheet.name for sheet in explain(classifier, picture).classes]
    explanation = explain(classifier, picture, top_classes=1, against=order[2])
    assert [sheet.name for sheet in explanation.classes] == [order[0], order[2]]
    lead = explanation.difference()
    best, rival = explanation.classes
    assert sum(row.points for row in lead.rows) == pytest.approx(best.logit - rival.logit, abs=1e-4)
    a, b = (classifier.weight_KP[classifier.classes.index(sheet.name)] for sheet in (best, rival))
    for row in lead.rows:
        assert row.weight == pytest.approx(float(a[row.match.prototype.id] - b[row.match.prototype.id]), abs=1e-6)
    assert {row.match.prototype.id for row in lead.rows} == set((a != b).nonzero()[:, 0].tolist())
    document = explanation.to_dict()
    assert document["against"] == order[2]
    assert len(document["difference"]) == len(lead.rows)
    assert sum(group["points"] for group in document["difference_groups"]) == pytest.approx(lead.logit, abs=1e-4)


def test_what_decides_comes_first(classifier: Classifier, picture: Path, tmp_path: Path) -> None:
    """The lead over the runner-up, prototype by prototype, before any class's total, wherever it is shown."""
    explanation = explain(classifier, picture)
    best, second, _ = explanation.classes
    assert explanation.rival == explanation.to_dict()["against"] == second.name
    lead = explanation.sheets[0]
    assert explanation.sheets[1:] == explanation.classes
    assert lead.title == f"Why {best.name} and not {second.name}"
    assert lead.logit == best.logit - second.logit
    points = {}
    for sign, sheet in ((1, best), (-1, second)):
        for row in sheet.rows:
            points[row.match.prototype.id] = points.get(row.match.prototype.id, 0) + sign * row.points
    assert {row.match.prototype.id: row.points for row in lead.rows} == pytest.approx(points)

    html = explanation.save(tmp_path / "why.html").read_text()
    titles = [lead.title, *(f"Evidence for {sheet.name}" for sheet in explanation.classes)]
    places = [html.index(f"<h3>{title}</h3>") for title in titles]
    assert places == sorted(places)
    opened = [html.rindex("<details", 0, place) for place in places]
    assert ["open>" in html[start:place] for start, place in zip(opened, places, strict=True)] == [
        True,
        *[False] * 3,
    ]
    lines = str(explanation).splitlines()
    assert lines[1] == f"{lead.title}:"
    assert lines[-1].strip() == f"{lead.logit:+.2f} points ahead: {best.logit:.2f} against {second.logit:.2f}"
    alone = explain(classifier, picture, top_classes=1)
    assert alone.sheets == alone.classes
    assert explanation.figure(long=True).height > explain(classifier, picture, top_classes=2).figure(long=True).height

    first = explanation.figure()
    without = replace(explanation, rival=None).figure()
    assert first.height - without.height > 200, "the picture has one sheet more"


def test_prediction_compared_with_itself_is_compared_with_the_runner_up(classifier: Classifier, picture: Path) -> None:
    order = [sheet.name for sheet in explain(classifier, picture).classes]
    assert explain(classifier, picture, top_classes=1, against=order[0]).rival == order[1]


def test_mistakes_get_a_sentence(classifier: Classifier, picture: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no class called 'finsh'; did you mean finch"):
        explain(classifier, picture, against="finsh")
    with pytest.raises(UserError, match="no class called 'XYZ'"):
        explain(classifier, picture, against="XYZ")
    with pytest.raises(UserError, match="At least 1 class"):
        explain(classifier, picture, top_classes=0)
    explanation = explain(classifier, picture, top_classes=1)
    with pytest.raises(UserError, match="against=CLASS"):
        explanation.difference()
    with pytest.raises(UserError, match=r"\.html, \.png, \.pdf or \.json"):
        explanation.save(tmp_path / "sheet.doc")


@pytest.mark.parametrize("cropped", [False, True])
@pytest.mark.parametrize("orientation", TO_STORED)
def test_boxes_are_in_pixels_of_the_file(
    classifier: Classifier, tmp_path: Path, orientation: int, cropped: bool
) -> None:
    """The same upright picture, however it is stored, is explained the same way, and the file has under each box
    the pixels that the network saw there."""
    colours = np.random.default_rng(5).integers(0, 256, (*MAP_HW, 3), np.uint8)
    grid_picture(tmp_path / "upright.png", colours)
    upright = Image.open(tmp_path / "upright.png")
    reference = explain(classifier, tmp_path / "upright.png")
    crop_to = grid_picture(tmp_path / "stored.png", colours, orientation, cropped)
    explanation = explain(classifier, tmp_path / "stored.png", crop_to=crop_to)
    stored = Image.open(tmp_path / "stored.png")
    assert explanation.picture.size == upright.size
    for mine, other in zip(explanation.predicted.rows, reference.predicted.rows, strict=True):
        assert mine.points == pytest.approx(other.points, abs=1e-6)
        assert mine.match.share == pytest.approx(other.match.share)
        assert scaled(other.match.share, *upright.size) == pytest.approx(other.match.box)
        region = stored.crop(tuple(round(v) for v in mine.match.box))  # type: ignore[arg-type]
        expected = upright.crop(tuple(round(v) for v in other.match.box))  # type: ignore[arg-type]
        turn = TO_STORED[orientation]
        turned = expected.transpose(turn) if turn is not None else expected
        assert region.size == turned.size
        assert np.array_equal(np.asarray(region), np.asarray(turned))


def test_cells_of_prototypes_are_the_cells_they_were_projected_from(run: TinyRun) -> None:
    """Over pictures with every EXIF orientation, with and without a crop box."""
    orientations = set()
    for prototype in run.prototypes:
        stored = Image.open(run.root / prototype.path)
        orientations.add(stored.getexif()[0x0112])
        x0, y0, x1, y1 = prototype.cell
        colour = tuple(run.colours[prototype.path][prototype.row, prototype.column].tolist())
        region = stored.crop((round(x0), round(y0), round(x1), round(y1)))
        assert region.getcolors() == [(CELL_HW[0] * CELL_HW[1], colour)]
    assert len(orientations) > 2


def test_box_of_a_prototype_meets_its_cell(run: TinyRun, classifier: Classifier) -> None:
    for prototype in run.prototypes:
        a, b = prototype.box, prototype.cell
        assert a[0] < b[2]
        assert b[0] < a[2]
        assert a[1] < b[3]
        assert b[1] < a[3]
    # The map on the source picture peaks at the place of projection, and the explained box is the stored one.
    prototype = run.prototypes[1]
    explanation = explain(classifier, run.root / prototype.path, crop_to=prototype.crop_to, top_classes=3)
    match = next(match for match in explanation.nearest if match.prototype.id == prototype.id)
    assert divmod(int(match.map_HW.argmax()), MAP_HW[1]) == (prototype.row, prototype.column)
    assert match.box == pytest.approx(prototype.box)


def test_gallery_pictures_show_what_the_boxes_say(run: TinyRun) -> None:
    turned = []
    for prototype, sample in ((p, next(s for s in run.samples if s.path == p.path)) for p in run.prototypes):
        cells = Image.fromarray(run.colours[sample.path].repeat(CELL_HW[0], 0).repeat(CELL_HW[1], 1))
        source = Image.open(run.path / prototype.source)
        assert max(source.size) <= 256
        assert source.width / source.height == pytest.approx(cells.width / cells.height, rel=0.02)
        assert difference(source, cells) < 6
        crop = Image.open(run.path / prototype.crop)
        assert max(crop.size) <= 160
        scale = cells.width / source.width
        region = cells.crop(tuple(round(v * scale) for v in prototype.source_box))  # type: ignore[arg-type]
        assert difference(crop, region) < 6
        turned.append(difference(crop, region.transpose(Image.Transpose.ROTATE_180)))
    assert max(turned) > 20, "the comparison tells pictures apart"


def difference(a: Image.Image, b: Image.Image) -> float:
    """Mean absolute difference of two pictures at the smaller one's size."""
    a, b = sorted((a.convert("RGB"), b.convert("RGB")), key=lambda image: image.width)
    return float(np.abs(np.asarray(a, float) - np.asarray(b.resize(a.size, Image.Resampling.LANCZOS), float)).mean())


def test_prototypes_file_is_what_was_returned_and_old_pictures_go(run: TinyRun) -> None:
    assert read_prototypes(run.path) == run.prototypes
    assert [prototype.id for prototype in run.prototypes] == list(range(6))
    pictures = {path.relative_to(run.path).as_posix() for path in (run.path / "prototypes").iterdir()}
    assert pictures == {name for p in run.prototypes for name in (p.crop, p.source)}
    assert run.prototypes[0].label == 0
    assert any(p.crop_to == (*BORDER, BORDER[0] + 5 * CELL_HW[1], BORDER[1] + 3 * CELL_HW[0]) for p in run.prototypes)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_draw_what_threads_draw(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MANY_LONG", 1)
    other = make_run(tmp_path)
    assert other.prototypes == run.prototypes
    pictures = sorted(path.name for path in (run.path / "prototypes").iterdir())
    assert pictures == sorted(path.name for path in (other.path / "prototypes").iterdir())
    for name in pictures:
        assert (run.path / "prototypes" / name).read_bytes() == (other.path / "prototypes" / name).read_bytes()


def test_members_of_a_combined_classifier_add_their_points(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path, seed=3, per_class=1, input_size="64x64")
    both = combined(run, other)
    picture = run.root / run.samples[1].path
    crop_to = run.samples[1].box
    explanation = explain(both, picture, crop_to=crop_to)
    singles = [explain(load(r.path, "cpu"), picture, crop_to=crop_to) for r in (run, other)]
    for sheet in explanation.classes:
        assert sheet.logit == pytest.approx(sum(single.sheet(sheet.name).logit for single in singles), abs=1e-4)
        expected = {}
        for start, single in zip((0, len(run.prototypes)), singles, strict=True):
            expected.update({start + row.match.prototype.id: row for row in single.sheet(sheet.name).rows})
        assert {row.match.prototype.id for row in sheet.rows} == set(expected)
        for row in sheet.rows:
            alone = expected[row.match.prototype.id]
            assert row.points == pytest.approx(alone.points, abs=1e-5)
            assert row.match.box == pytest.approx(alone.match.box)
    assert explanation.figure().width > 0


def test_batch_gives_what_single_pictures_give(run: TinyRun, classifier: Classifier) -> None:
    chosen = run.samples[:4]
    prepared = [classifier.prepare(run.root / sample.path, sample.box) for sample in chosen]
    together = explain_batch(classifier, prepared, paths=[sample.path for sample in chosen])
    for explanation, sample in zip(together, chosen, strict=True):
        alone = explain(classifier, run.root / sample.path, crop_to=sample.box)
        assert explanation.path == sample.path
        for a, b in zip(explanation.predicted.rows, alone.predicted.rows, strict=True):
            assert a.match.prototype.id == b.match.prototype.id
            assert a.points == pytest.approx(b.points, abs=1e-4)


def test_whole_windows_larger_than_a_cell(tmp_path: Path) -> None:
    run = make_run(tmp_path, per_class=1, prototype_shape="2x3")
    for prototype in run.prototypes:
        x0, y0, x1, y1 = prototype.cell
        assert (x1 - x0) * (y1 - y0) == 2 * CELL_HW[0] * 3 * CELL_HW[1]
    explanation = explain(load(run.path, "cpu"), run.root / run.samples[0].path)
    assert tuple(explanation.nearest[0].map_HW.shape) == (2, 3)


def test_figure_has_room_for_every_row_and_strange_names(tmp_path: Path) -> None:
    names = ("a\nb\x00" * 40, "Grünfink <b>", "普通翠鸟")
    run = make_run(tmp_path, names, per_class=5, nonzero=1.0)
    explanation = explain(load(run.path, "cpu"), run.root / run.samples[0].path)
    classes = explanation.classes
    figures = [replace(explanation, classes=classes[:count], rival=None).figure(long=True) for count in (1, 2, 3)]
    heights = [figure.height for figure in figures]
    for count in (2, 3):
        groups, others, _ = explanation.classes[count - 1].main_groups(10)
        assert heights[count - 1] - heights[count - 2] == 2 * (84 + len(groups) * (88 + 14) + 26 * bool(others) + 60)
    assert len({figure.width for figure in figures}) == 1


def test_saves_by_suffix(classifier: Classifier, picture: Path, tmp_path: Path) -> None:
    explanation = explain(classifier, picture)
    with Image.open(explanation.save(tmp_path / "a.png")) as image:
        assert image.format == "PNG"
        assert image.size == explanation.figure().size
    with Image.open(explanation.save(tmp_path / "long.png", long=True)) as image:
        assert np.array_equal(np.asarray(image), np.asarray(explanation.figure(long=True)))
    assert json.loads(explanation.save(str(tmp_path / "a.json")).read_text()) == explanation.to_dict()
    assert explanation.save(tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("against", [None, "owl"])
def test_a_sheet_is_one_page_that_can_be_mailed(tmp_path: Path, against: str | None) -> None:
    """With the hardest picture to compress, and more lines than a page has room for."""
    run = make_run(tmp_path, per_class=10, nonzero=1.0)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8))
    explanation = explain(load(run.path, "cpu"), noise, against=against)
    path = explanation.save(tmp_path / "a.png")
    assert 100_000 < path.stat().st_size <= 500_000
    with Image.open(path) as image:
        assert image.width > 1200
        assert image.height <= 297 / 210 * image.width, "A4"
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
    assert explanation.save(tmp_path / "long.png", long=True).stat().st_size > 2_000_000
    data = explanation.save(tmp_path / "a.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(data) <= 2_000_000
    (box,) = re.findall(rb"/MediaBox \[ ([\d. ]+) \]", data)  # one page
    width, height = list(map(float, box.split()))[2:]
    assert width == pytest.approx(210 / 25.4 * 72, abs=0.1), "as wide as A4"
    assert height <= 297 / 25.4 * 72


def test_pictures_without_a_path(classifier: Classifier, picture: Path) -> None:
    explanation = explain(classifier, picture.read_bytes())
    assert explanation.path is None
    assert explanation.to_dict()["predicted"] == explain(classifier, Image.open(picture)).predicted.name
    assert explanation.picture.size == (5 * CELL_HW[1], 3 * CELL_HW[0])


def test_missing_prototype_picture_gets_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    explanation = explain(load(run.path, "cpu"), run.root / run.samples[0].path)
    for path in (run.path / "prototypes").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="restore the run folder"):
        explanation.figure()


def test_any_class_can_be_explained_and_compared_with_any_other(classifier: Classifier, picture: Path) -> None:
    prepared = classifier.prepare(picture)
    outputs = classifier.outputs([prepared])
    every = explain(classifier, picture, top_classes=len(classifier.classes))
    second, last = every.classes[1].name, every.classes[-1].name
    (explanation,) = explain_batch(classifier, [prepared], Options(1, also=[last, second, last]), outputs=outputs)
    assert [sheet.name for sheet in explanation.classes] == [sheet.name for sheet in every.classes]
    assert explanation.rival is None
    lead = explanation.lead(last, second)
    assert lead.logit == explanation.sheet(last).logit - explanation.sheet(second).logit < 0
    weights = classifier.weight_KP[[classifier.classes.index(name) for name in (last, second)]].double()
    assert {row.match.prototype.id: row.weight for row in lead.rows} == {
        p: w for p, w in enumerate((weights[0] - weights[1]).tolist()) if w
    }
    with pytest.raises(UserError, match="no class called"):
        explain_batch(classifier, [prepared], Options(also=["nobody"]), outputs=outputs)
