"""The pages: whole without a network, faithful to the numbers, and proof against hostile names."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.explain_run import TinyRun, make_run, write_metrics

from likethat.errors import UserError
from likethat.explaining.draw.page import write_explanations
from likethat.explaining.draw.pictures import Pictures
from likethat.explaining.explanation import explain
from likethat.report.charts import round_ticks
from likethat.report.curves import HEIGHT, PROJECTION, STAGE, epoch_charts
from likethat.report.html import write_report
from likethat.runs.classifier import load
from likethat.runs.judged import JudgedImage
from likethat.runs.layout import read_metrics

HOSTILE = ('<script>alert("x")</script>', "owl' onload='alert(1)", 'wren & "co" {{ 7 * 7 }}')
METRICS: list[dict[str, object]] = [
    *(
        {
            "stage": "warm" if epoch < 2 else "joint",
            "cycle": 0,
            "epoch": epoch,
            "seconds": 30.0,
            "train": {"loss": 3.0 - epoch, "accuracy": 0.2 * epoch, "surprise": 1.0},
            "val": {"accuracy": 0.15 * epoch},
        }
        for epoch in range(4)
    ),
    {
        "stage": "project",
        "cycle": 0,
        "moved": {"mean": 0.125, "max": 0.5},
        "before": {"accuracy": 0.911},
        "after": {"accuracy": 0.822},
        "seconds": 1.0,
    },
    {"stage": "last_layer", "cycle": 0, "objective": 0.1, "val": {"accuracy": 0.933}, "seconds": 1.0},
    {"stage": "test", "images": 96, "accuracy": 0.875, "top5_accuracy": 1.0, "cross_entropy": 0.4},
]


class Tags(HTMLParser):
    """Start tags with their attributes, and all text outside styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] != "style":
            self.text += data

    def references(self) -> list[str]:
        return [value for _, attrs in self.tags for name in ("src", "href") if (value := attrs.get(name))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_run(tmp_path_factory.mktemp("hostile"), HOSTILE, per_class=5, nonzero=1.0)
    write_metrics(run.path, METRICS)
    return run


def report_of(run: TinyRun, explained: int = 2) -> str:
    classifier = load(run.path, "cpu")
    chosen = run.samples[:explained]
    explanations = [explain(classifier, run.root / sample.path, crop_to=sample.box) for sample in chosen]
    return write_report(run.path, classifier, explanations).read_text(encoding="utf-8")


def assert_harmless(page: Tags) -> None:
    assert not [tag for tag, attrs in page.tags if tag in ("script", "link", "iframe")]
    assert not [attrs for _, attrs in page.tags for name in attrs if name.startswith("on")]
    for name in HOSTILE:
        assert name in page.text


def test_explanations_are_one_file_with_escaped_names(run: TinyRun, tmp_path: Path) -> None:
    classifier = load(run.path, "cpu")
    first, second = (run.root / sample.path for sample in run.samples[:2])
    explanations = [explain(classifier, first), explain(classifier, second, top_classes=2, against=HOSTILE[0])]
    html = write_explanations(tmp_path / "page.html", explanations).read_text(encoding="utf-8")
    page = Tags(html)
    assert_harmless(page)
    assert all(reference.startswith(("data:image/", "#")) for reference in page.references())
    assert not re.search(r"url\(|@import", html)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    used = {reference[1:] for reference in page.references() if reference.startswith("#")}
    assert used <= ids, "every picture and anchor that the page uses is in it"
    for explanation in explanations:
        assert f"{100 * explanation.predicted.probability:.1f} %" in page.text
        for sheet in explanation.classes:
            assert f"{sheet.logit:.2f}".replace("-", "−") in page.text
            groups, others, rest = sheet.main_groups(10)
            assert sum(len(group.rows) for group in groups) + others == 15
            assert not others or f"{rest:+.2f}".replace("-", "−") in page.text
            for group in groups:
                assert f"{group.points:.2f}".replace("-", "−") in page.text
            for row in (row for group in groups for row in group.rows):
                assert f"{row.match.similarity:.2f} × {row.weight:.2f} = ".replace("-", "−") in page.text
    assert "points ahead" in page.text


def test_boxes_are_drawn_where_they_are(run: TinyRun) -> None:
    explanation = explain(load(run.path, "cpu"), run.root / run.samples[0].path)
    pictures = Pictures(inline=True)
    for match in explanation.nearest:
        part = pictures.part(explanation, match)
        scale = part.picture.width / explanation.picture.width
        assert part.picture.height == pytest.approx(explanation.picture.height * scale, abs=1)
        # The first picture is stored upright and whole, so the file's pixels are the picture's.
        assert part.box == pytest.approx([value * scale for value in match.box], abs=1)
        assert pictures.source(explanation, match).box == match.prototype.source_box
    assert len(pictures.by_key) == 1 + len({match.prototype.source for match in explanation.nearest})


def test_report_says_how_good_the_model_is_and_how_it_got_there(run: TinyRun) -> None:
    page = Tags(report_of(run))
    assert_harmless(page)
    text = " ".join(page.text.split())
    assert "87.5 % of 96 test images" in text
    assert "95 % interval 79.4 % to 92.7 %" in text  # Wilson's, for 84 of 96
    assert "test_resnet" in text
    assert "1 91.1 % 82.2 % 93.3 % 0.125" in text
    assert "Training time 2 min" in text
    assert all(reference.startswith(("data:image/", "#")) for reference in page.references())
    lines = [attrs["points"] for tag, attrs in page.tags if tag == "polyline"]
    assert len(lines) == 4, "accuracy of train and val, loss, and the quantity nobody told the page about"
    assert all(len((points or "").split()) == 4 for points in lines)
    crops = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(crops) == 2 * 15


def test_many_prototypes_stay_in_their_files(tmp_path: Path) -> None:
    run = make_run(tmp_path, tuple(f"class {number}" for number in range(13)), per_class=5, pictures_per_class=1)
    page = Tags(report_of(run, explained=1))
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 2 * 65
    assert all(attrs["loading"] == "lazy" for attrs in images)
    files = [reference for reference in page.references() if not reference.startswith(("data:", "#"))]
    assert {attrs["src"] for attrs in images} <= set(files)
    assert all((run.path / file).is_file() for file in files)
    # Only the explained picture and its maps are in the page.
    assert len((run.path / "report.html").read_bytes()) < 250_000


def test_wrong_images_are_listed_and_marked_in_the_examples(run: TinyRun) -> None:
    classifier = load(run.path, "cpu")
    chosen = run.samples[:2]
    explanations = [
        replace(explain(classifier, run.root / sample.path, crop_to=sample.box), path=sample.path) for sample in chosen
    ]
    guesses = [explanation.predicted.name for explanation in explanations]
    other = next(name for name in HOSTILE if name != guesses[0])
    judged = [
        JudgedImage("test", chosen[0].path, other, guesses[0], 0.625),
        JudgedImage("test", chosen[1].path, guesses[1], guesses[1], 0.875),
    ]
    page = Tags(write_report(run.path, classifier, explanations, judged).read_text(encoding="utf-8"))
    assert_harmless(page)
    assert page.text.count("Wrong: it is") == 1
    assert page.text.index("Wrong: it is " + other) < page.text.index(chosen[0].path)
    assert "1 of 2 is taken for another class" in " ".join(page.text.split())
    assert "62.5 %" in page.text
    assert "87.5 %" not in page.text.replace("87.5 %", "", 1), "only the accuracy"


def test_report_without_metrics_or_examples(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = Tags(report_of(run, explained=0))
    assert "finch" in page.text
    assert not [tag for tag, _ in page.tags if tag == "polyline"]


def test_a_report_says_why_training_accuracy_falls_on_views_pieced_together(run: TinyRun, tmp_path: Path) -> None:
    reason = "a piece of another picture covers part of a view"
    pieced = make_run(tmp_path, add_on="linear", baseline_epochs=1, distillation=1.0, cutmix=1.0)
    write_metrics(pieced.path, METRICS)
    assert reason in report_of(pieced, explained=0)
    assert reason not in report_of(run, explained=0)


def test_the_stages_of_an_older_run_have_their_names_of_today(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_metrics(run.path, [entry | {"stage": "classifier"} if "epoch" in entry else entry for entry in METRICS])
    assert {entry["stage"] for entry in read_metrics(run.path)} == {"baseline", "project", "last_layer", "test"}
    (words,) = {Tags(chart.svg).text for chart in epoch_charts(read_metrics(run.path)) if chart.title == "Accuracy"}
    assert re.search(r"\bbaseline\b", words)
    assert "classifier" not in words


def test_damaged_metrics_get_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "metrics.jsonl").write_text('{"stage": "warm"\n')
    with pytest.raises(UserError, match="damaged"):
        report_of(run, explained=0)


def test_curves_leave_out_what_cannot_be_drawn() -> None:
    entries = [{"stage": "warm", "train": {"loss": loss}} for loss in (4.0, float("nan"), 2.0, float("inf"), 0.0)]
    (chart,) = epoch_charts(entries)
    (points,) = [attrs["points"] or "" for tag, attrs in Tags(chart.svg).tags if tag == "polyline"]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert len(heights) == 3
    assert heights[0] < heights[1] < heights[2] < HEIGHT
    assert chart.last == {"train": "0"}


def test_curves_mark_stages_and_projections_where_they_happened() -> None:
    chart = epoch_charts([*METRICS[:4], {"stage": "last_layer", "train": {"accuracy": 1.0}}, *METRICS[4:]])[0]
    assert chart.title == "Accuracy"
    picture = Tags(chart.svg)
    assert re.search(r"\bwarm\b.*\bjoint\b", picture.text, re.DOTALL)
    warm, solved = (attrs for _, attrs in picture.tags if attrs.get("fill") == STAGE)
    field = float(solved["x"] or 0) + float(solved["width"] or 0) - float(warm["x"] or 0)
    assert float(warm["width"] or 0) == pytest.approx(field * 2 / 5, abs=0.1)
    assert float(solved["width"] or 0) == pytest.approx(field / 5, abs=0.1), "behind the two epochs of joint"
    (projection,) = (attrs for _, attrs in picture.tags if attrs.get("stroke") == PROJECTION)
    assert float(projection["x1"] or 0) == pytest.approx(float(solved["x"] or 0) + float(solved["width"] or 0), abs=0.1)
    assert float(projection["x2"] or 0) == float(projection["x1"] or 0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 0.7), (2.0, 2.0), (0.0, 0.0), (1e-7, 3e-7), (0, 12345)])
def test_ticks_are_round_and_span_the_values(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert ticks[0] < ticks[-1]
