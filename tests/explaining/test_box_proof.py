"""Networks that see windows: boxes are what was seen, to the pixel, and the check that says so can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.explain_run import make_run
from helpers.tiny import tiny_model

from likethat.explaining.attribution import OCCLUSION
from likethat.explaining.boxes import SEEN_ALONE, match_boxes, patch_box, whole_map
from likethat.explaining.explanation import explain
from likethat.explaining.verify import MOST_CHANGE, changes_by_outside, prove_boxes, verify
from likethat.metrics.regions import boxes_in, peaks_in
from likethat.models.protopnet import ProtoPNet
from likethat.runs.classifier import load

WINDOWS = {"windows": "48,16", "input_size": "64x96"}  # 2 x 4 of them


@pytest.fixture
def model() -> ProtoPNet:
    return tiny_model([2, 2], **WINDOWS).eval()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_a_box_holds_all_pixels_that_the_similarity_depends_on_and_no_others(shape: tuple[int, int]) -> None:
    model = tiny_model([2, 2], prototype_shape=shape, **WINDOWS).eval()
    x = torch.rand(1, 3, 64, 96, requires_grad=True)
    output = model(x)
    similarity_PHW = output.similarity_BPHW[0].detach()
    for p, box in enumerate(match_boxes(model, similarity_PHW)):
        (gradient,) = torch.autograd.grad(output.score_BP[0, p], x, retain_graph=True)
        ys, xs = gradient[0].abs().sum(0).nonzero().unbind(1)
        assert box == (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
        row, column = divmod(int(similarity_PHW[p].argmax()), similarity_PHW.shape[2])
        assert patch_box(model, row, column) == box


def test_percentiles_and_other_maps_do_not_move_a_window(model: ProtoPNet) -> None:
    similarity_PHW = torch.zeros(1, 2, 4)
    similarity_PHW[0, 1, 2] = 1
    assert match_boxes(model, similarity_PHW) == [(32, 16, 80, 64)]
    assert match_boxes(model, similarity_PHW, 50.0, torch.rand(1, 14, 14)) == [(32, 16, 80, 64)]


def test_metrics_have_the_same_boxes_and_their_middles(model: ProtoPNet) -> None:
    similarity_PHW = torch.rand(5, 2, 4)
    sides = torch.tensor([96, 64, 96, 64])
    expected = torch.tensor(match_boxes(model, similarity_PHW)) / sides
    torch.testing.assert_close(boxes_in(model, similarity_PHW), expected)
    torch.testing.assert_close(peaks_in(model, similarity_PHW), (expected[:, :2] + expected[:, 2:]) / 2)


def test_a_map_shows_the_best_window_over_each_place(model: ProtoPNet) -> None:
    map_PHW = torch.randn(3, 2, 4)
    found = whole_map(model.backbone, map_PHW)
    assert found.shape == (3, 56, 56)
    for p in range(3):
        for i in range(56):
            for j in range(0, 56, 5):
                y, x = (i + 0.5) * 64 / 56, (j + 0.5) * 96 / 56
                over = [
                    float(map_PHW[p, row, column])
                    for row in range(2)
                    for column in range(4)
                    if 16 * row <= y < 16 * row + 48 and 16 * column <= x < 16 * column + 48
                ]
                assert float(found[p, i, j]) == pytest.approx(max(over))
    plain = tiny_model([1, 1])
    assert whole_map(plain.backbone, map_PHW) is map_PHW


def test_nothing_outside_a_window_counts_and_without_windows_it_does(model: ProtoPNet) -> None:
    x_N3HW, prototypes = torch.rand(3, 3, 64, 96), torch.arange(4)
    plain = tiny_model([2, 2], input_size="64x96").eval()
    for number in range(3):
        assert changes_by_outside(model, x_N3HW, number, prototypes).tolist() == [0.0] * 4
        assert (changes_by_outside(plain, x_N3HW, number, prototypes) > 10 * MOST_CHANGE).all()
    assert changes_by_outside(model, x_N3HW[:1], 0, prototypes).tolist() == [0.0] * 4
    assert (changes_by_outside(plain, x_N3HW[:1], 0, prototypes) > 10 * MOST_CHANGE).all()


def test_verification_proves_the_boxes_of_windows_only(tmp_path: Path) -> None:
    windowed, plain = make_run(tmp_path / "windowed", windows="48,16"), make_run(tmp_path / "plain")
    verification = verify(load(windowed.path, "cpu"), [windowed.root])
    assert verification.passed
    assert verification.boxes is not None
    assert (verification.boxes.prototypes, verification.boxes.max_change) == (6, 0.0)
    assert verification.boxes.pictures == len({prototype.path for prototype in windowed.prototypes})
    assert verify(load(plain.path, "cpu"), [plain.root]).boxes is None
    # The same check of a network that sees more than its boxes.
    proof, failures = prove_boxes(plain.model, plain.prototypes[:2], plain.prototypes, plain.root)
    assert proof.max_change > MOST_CHANGE
    assert {failure.prototype for failure in failures} == set(range(6))
    assert "outside its box" in failures[0].reason


def test_a_changed_picture_is_told_once_and_others_still_prove_the_boxes(tmp_path: Path) -> None:
    run = make_run(tmp_path, windows="48,16")
    changed = run.prototypes[0].path
    (run.root / changed).write_bytes((run.root / run.samples[-1].path).read_bytes() + b" ")
    verification = verify(load(run.path, "cpu"), [run.root])
    assert {failure.path for failure in verification.failures} == {changed}
    assert all("changed since" in failure.reason for failure in verification.failures)
    assert verification.boxes is not None
    assert verification.boxes.max_change == 0


def test_explanations_show_windows_and_say_so(tmp_path: Path) -> None:
    """Pictures are turned, and some cropped; files have three and two times as many pixels as the network sees."""
    run = make_run(tmp_path / "windowed", windows="48,16")
    classifier = load(run.path, "cpu")
    sample = run.samples[0]  # neither turned nor cropped
    for attribution in ("upsampling", OCCLUSION):
        explanation = explain(classifier, run.root / sample.path, attribution=attribution)
        (output,) = classifier.outputs([classifier.prepare(run.root / sample.path)])
        for match in explanation.nearest:
            row, column = divmod(int(output.distance_BPHW[0, match.prototype.id].argmin()), 8)
            x0, y0 = 16 * column, 16 * row
            assert match.box == pytest.approx((x0 * 2, y0 * 3, (x0 + 48) * 2, (y0 + 48) * 3))
            assert match.share == pytest.approx((x0 / 160, y0 / 96, (x0 + 48) / 160, (y0 + 48) / 96))
        assert SEEN_ALONE in explanation.save(tmp_path / "e.html").read_text()
    for prototype in run.prototypes:
        assert prototype.box == prototype.cell
        width, height = prototype.box[2] - prototype.box[0], prototype.box[3] - prototype.box[1]
        assert sorted([width, height]) == pytest.approx([96, 144])
    plain = make_run(tmp_path / "plain")
    explanation = explain(load(plain.path, "cpu"), plain.root / sample.path)
    assert SEEN_ALONE not in explanation.save(tmp_path / "e.html").read_text()
