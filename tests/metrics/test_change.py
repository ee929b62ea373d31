"""Metrics that change the picture: networks of which it is known what they must answer, and slow literal versions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.metric_cases import MAP, SIDE, Everywhere, Local, case, colour_network, picture_batch, reading, spot
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from likethat.explaining.boxes import upsample
from likethat.metrics.background import Background
from likethat.metrics.degradation import Degradation, through_jpeg
from likethat.metrics.deletion import Deletion
from likethat.metrics.leakage import Leakage
from likethat.metrics.misalignment import (
    Misalignment,
    active_pixels,
    attack,
    free_pixels,
    location_change,
    others_above,
    similarity_kept,
)
from likethat.metrics.receptive_field import ReceptiveField, energy_inside
from likethat.metrics.redundancy import Redundancy
from likethat.metrics.regions import box_masks, boxes_in, distance_to_box, intersection_over_union, peaks_of_maps
from likethat.metrics.response import moved_boxes, respond
from likethat.metrics.reveal import STEPS, blurred, elsewhere, reveal
from likethat.metrics.sweep import Batch
from likethat.metrics.transformations import LIGHTS, MOVES, Transformations, warp

RED, GREEN, BLUE, GREY = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.5)
OWN_2 = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])


def painted(*cells: dict[tuple[int, int], tuple[float, ...]]) -> Tensor:
    """Grey pictures with some cells (row, column) of another colour."""
    x_B3HW = torch.full((len(cells), 3, SIDE, SIDE), 0.5)
    step = SIDE // MAP
    for number, colours in enumerate(cells):
        for (row, column), colour in colours.items():
            box = x_B3HW[number, :, row * step : (row + 1) * step, column * step : (column + 1) * step]
            box[:] = torch.tensor(colour)[:, None, None]
    return x_B3HW


def red_and_green(backbone: Local, off: float = 0.1) -> Batch:
    """Pictures of two classes: one has a red cell, the other a green one. Prototypes are `off` these colours, since
    where the distance is 0, so is the gradient."""
    network = colour_network(backbone, [(1 - off, off, off), (off, 1 - off, off)], [0, 1], OWN_2)
    x_B3HW = painted({(1, 1): RED}, {(2, 1): GREEN}, {(1, 2): RED}, {(2, 2): GREEN}, {(0, 3): RED}, {(3, 0): GREEN})
    return picture_batch(network, x_B3HW, [0, 1, 0, 1, 0, 1])


# --- regions ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_boxes_and_masks_agree_with_counting_pixels(corners: list[int]) -> None:
    ax, ay, bx, by = (sorted(corners[i : i + 2]) for i in (0, 2, 4, 6))
    a, b = torch.tensor([[ax[0], ay[0], ax[1], ay[1]]]) / 20, torch.tensor([[bx[0], by[0], bx[1], by[1]]]) / 20
    mask_a, mask_b = (box_masks(box[None], (20, 20))[0, 0] for box in (a, b))
    union = int((mask_a | mask_b).sum())
    assert float(intersection_over_union(a, b)) == pytest.approx(int((mask_a & mask_b).sum()) / max(union, 1), abs=1e-5)


def test_distance_to_a_box() -> None:
    box = torch.tensor([[0.2, 0.2, 0.4, 0.4]] * 3)
    points = torch.tensor([[0.3, 0.25], [0.9, 0.3], [0.7, 0.8]])
    assert distance_to_box(points, box).tolist() == pytest.approx([0, 0.5, 0.5], abs=1e-6)


# --- moving the picture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_a_dot_goes_where_the_move_says(name: str, size: tuple[int, int]) -> None:
    height, width = size
    y, x = height // 3, width // 4
    picture = torch.zeros(1, 3, height, width)
    picture[:, :, y - 1 : y + 2, x - 1 : x + 2] = 1
    place = MOVES[name] @ torch.tensor([(x + 0.5) / width, (y + 0.5) / height, 1.0])
    moved_HW = warp(picture, MOVES[name])[0, 0]
    weight_HW = moved_HW / moved_HW.sum()
    centre_x = float((weight_HW.sum(0) * (torch.arange(width) + 0.5)).sum()) / width
    centre_y = float((weight_HW.sum(1) * (torch.arange(height) + 0.5)).sum()) / height
    assert (centre_x, centre_y) == pytest.approx(place.tolist(), abs=0.01)


@pytest.mark.parametrize("name", MOVES)
def test_boxes_move_as_their_corners_do(name: str) -> None:
    box = torch.tensor([[0.3, 0.35, 0.5, 0.7]])
    corners = [MOVES[name] @ torch.tensor([x, y, 1.0]) for x in (0.3, 0.5) for y in (0.35, 0.7)]
    xs, ys = [float(corner[0]) for corner in corners], [float(corner[1]) for corner in corners]
    assert moved_boxes(box, MOVES[name])[0].tolist() == pytest.approx([min(xs), min(ys), max(xs), max(ys)], abs=1e-6)


def test_a_network_that_sees_cells_only_follows_a_flip_exactly() -> None:
    batch = red_and_green(Local())
    metric = Transformations(batch.subject)
    metric.collect(batch)
    flips = metric.moved.seen["flip"]
    assert torch.cat([flip.overlap_B for flip in flips]).tolist() == pytest.approx([1.0] * 6)
    assert torch.cat([flip.change_B for flip in flips]).tolist() == pytest.approx([0.0] * 6, abs=1e-4)
    overlap, _, kept = metric.figures()[:3]
    assert kept.value == 1.0
    assert overlap.value is not None
    assert 0.3 < overlap.value < 1, "shifts by half a cell cannot be followed exactly"
    assert set(metric.lit.seen) == set(LIGHTS)


def test_a_box_that_stays_while_the_picture_is_flipped_has_no_overlap() -> None:
    map_BPHW = torch.stack([spot(0.1, 0.1), spot(0.9, 0.9)])[:, None]
    batch = case(map_BPHW, [0, 0], [0], torch.ones(1, 1))
    network = batch.subject.classifier.networks[0]
    stays = respond(batch, reading(network, map_BPHW), MOVES["flip"])
    follows = respond(batch, reading(network, map_BPHW.flip(3) * 1.5), MOVES["flip"])
    assert stays.overlap_B.tolist() == [0.0, 0.0]
    assert follows.overlap_B.tolist() == pytest.approx([1.0, 1.0])
    assert follows.change_B.tolist() == pytest.approx([0.5, 0.5])


def test_pictures_without_evidence_are_left_out() -> None:
    map_BPHW = torch.stack([spot(0.1, 0.1), -spot(0.1, 0.1) - 1])[:, None]
    batch = case(map_BPHW, [0, 0], [0], torch.ones(1, 1))
    overlap_B = respond(batch, batch.clean).overlap_B
    assert overlap_B[0] == 1
    assert overlap_B[1].isnan()


# --- JPEG and noise ---------------------------------------------------------------------------------------------


def test_jpeg_leaves_flat_pictures_alone_and_changes_noise() -> None:
    flat = torch.full((2, 3, 32, 32), 128 / 255)
    assert (through_jpeg(flat) - flat).abs().max() < 0.01
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 3, 32, 32, generator=generator)
    assert (through_jpeg(noise) - noise).abs().mean() > 0.02


def test_what_does_not_depend_on_single_pixels_outlives_jpeg_and_noise() -> None:
    batch = red_and_green(Local())
    metric = Degradation(batch.subject)
    metric.collect(batch)
    for figure in metric.figures():
        assert figure.value is not None
        if figure.name.startswith("similarity change"):
            assert figure.value < 0.3
        else:
            assert figure.value > 0.95


# --- inside and outside the box ---------------------------------------------------------------------------------


class Shifted(Local):
    """A backbone whose cells see what lies an eighth of the picture further right and a sixteenth further up."""

    name = "shifted"

    def forward(self, x_B3HW: Tensor) -> Tensor:
        return super().forward(x_B3HW.roll((SIDE // 16, -SIDE // 8), (2, 3)))


def test_what_a_cell_sees_is_found_beside_its_box_where_the_network_shifts_it() -> None:
    network = colour_network(Shifted(), [(0.9, 0.1, 0.1), (0.1, 0.9, 0.1)], [0, 1], OWN_2)
    x_B3HW = painted({(1, 1): RED}, {(2, 1): GREEN}, {(1, 2): RED}, {(2, 2): GREEN}).roll(
        (-SIDE // 16, SIDE // 8), (2, 3)
    )
    offsets = {}
    for batch in (picture_batch(network, x_B3HW, [0, 1, 0, 1]), red_and_green(Local())):
        metric = ReceptiveField(batch.subject)
        metric.collect(batch)
        offsets[batch.subject.classifier.networks[0].backbone.name] = [f.value for f in metric.figures()[1:]]
    assert offsets["shifted"] == pytest.approx([1 / 8, -1 / 16], abs=0.01)
    assert offsets["local"] == pytest.approx([0, 0], abs=0.01)


def test_an_attack_outside_the_box_cannot_touch_a_network_that_sees_cells_only() -> None:
    batch = red_and_green(Local())
    metric = Misalignment(batch.subject)
    metric.collect(batch)
    pac, plc, prc, _, start_plc, start_prc, small, kept = metric.figures()
    assert [figure.value for figure in (prc, start_prc, small)] == pytest.approx([0] * 3, abs=1e-6)
    for (found,) in (metric.attacked, metric.started):  # the others' boxes are at the rim
        assert found.pac_B[:4].tolist() == pytest.approx([0] * 4, abs=1e-6)
    for figure in (plc, start_plc):
        assert figure.value == pytest.approx(0, abs=0.01), "the least active of the active pixels may be any"
    assert "40 steps of 0.01, at most 0.4" in pac.note
    assert "5.71 px (10 at 224)" in pac.note
    assert kept.value is not None
    assert kept.value > 0.1


def test_an_attack_outside_the_box_lowers_a_similarity_that_comes_from_everywhere() -> None:
    batch = red_and_green(Everywhere())
    metric = Misalignment(batch.subject)
    metric.collect(batch)
    pac, _, _, start, _, _, small, _ = (figure.value for figure in metric.figures())
    assert pac is not None
    assert start is not None
    assert small is not None
    assert pac > small > 0.005, "what may change more takes more"
    assert pac > abs(start), "steps take more than chance"


def test_the_attack_stays_within_its_bounds() -> None:
    network = red_and_green(Everywhere()).subject.classifier.networks[0]
    x_B3HW = painted({(1, 1): RED})
    free_B1HW = torch.rand(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) < 0.5
    start, changed = attack(network, x_B3HW, torch.tensor([0]), free_B1HW, torch.Generator().manual_seed(0))
    for x in (start, changed):
        change = (x - x_B3HW).abs()
        assert change[~free_B1HW.expand_as(change)].max() == 0
        for found, std in zip(change.amax((0, 2, 3)).tolist(), (0.229, 0.224, 0.225), strict=True):
            assert 0.39 * std < found <= 0.4 * std + 1e-6
    assert network(changed).score_BP[0, 0] < network(start).score_BP[0, 0]


def test_the_attack_is_projected_gradient_descent_step_by_step() -> None:
    """On the normalised picture, as the benchmark's library does it: a step against the sign, then the bound."""
    network = red_and_green(Everywhere()).subject.classifier.networks[0]
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x_B3HW = painted({(1, 1): RED})
    free_B1HW = free_pixels(torch.tensor([[0.25, 0.25, 0.5, 0.5]]), (SIDE, SIDE), rim=True)
    start, found = attack(network, x_B3HW, torch.tensor([0]), free_B1HW, torch.Generator().manual_seed(0))
    clean, changed = (x_B3HW - mean) / std, (start - mean) / std
    for _ in range(40):
        changed = changed.detach().requires_grad_()
        masked = torch.where(free_B1HW, changed, clean)
        network(masked * std + mean).score_BP[0, 0].backward()
        assert changed.grad is not None
        changed = clean + (changed - 0.01 * changed.grad.sign() - clean).clamp(-0.4, 0.4)
    expected = torch.where(free_B1HW, changed, clean) * std + mean
    assert (found - expected).abs().max() < 1e-4


def test_free_pixels_are_those_outside_the_grown_box_and_the_last_row_and_column() -> None:
    """Slices of the benchmark's code: [max(low - 10, 0) : min(high + 10, 223)]."""
    for x0, y0, x1, y1 in ((30, 40, 80, 70), (0, 5, 20, 224), (200, 0, 224, 219)):
        free_HW = torch.ones(224, 224, dtype=torch.bool)
        free_HW[max(y0 - 10, 0) : min(y1 + 10, 223), max(x0 - 10, 0) : min(x1 + 10, 223)] = False
        assert torch.equal(free_pixels(torch.tensor([[x0, y0, x1, y1]]) / 224, (224, 224), rim=True)[0, 0], free_HW)


def test_active_pixels_are_those_above_the_quantile() -> None:
    map_BHW = torch.rand(5, 7, 7, generator=torch.Generator().manual_seed(0))
    map_BHW[4] = 1.0  # a map without contrast has no active region
    pixel_Bn = F.interpolate(map_BHW[:, None], (56, 56), mode="bilinear").flatten(1)
    expected_Bn = pixel_Bn > pixel_Bn.quantile(0.9, dim=1, keepdim=True)
    assert torch.equal(active_pixels(map_BHW, (56, 56)), expected_Bn)
    assert not expected_Bn[4].any()
    assert location_change(map_BHW[4:], map_BHW[4:], (56, 56)).tolist() == [0.0]


def test_location_change_counts_the_tenth_of_the_pixels_that_are_most_active() -> None:
    before, same, other = spot(0.1, 0.1)[None], 3 * spot(0.1, 0.1)[None] + 1, spot(0.9, 0.9)[None]
    assert float(location_change(before, same, (SIDE, SIDE))) == 0
    assert float(location_change(before, other, (SIDE, SIDE))) == 1


def test_rank_counts_prototypes_of_other_classes() -> None:
    score_BP = torch.tensor([[3.0, 5.0, 4.0, 1.0], [9.0, 5.0, 4.0, 1.0]])
    class_P, prototype_B = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0])
    assert others_above(score_BP, prototype_B, class_P, torch.tensor([0, 0])).tolist() == [1, 0]
    assert others_above(score_BP, prototype_B, class_P, torch.tensor([1, 1])).tolist() == [1, 0]
    assert others_above(score_BP, torch.tensor([3, 3]), class_P, torch.tensor([1, 1])).tolist() == [2, 2]


def test_similarity_kept_is_that_of_pasting_by_hand() -> None:
    batch = red_and_green(Everywhere())
    network = batch.subject.classifier.networks[0]
    expected = []
    for b in range(len(batch)):
        p = int(batch.evidence.prototype_BE[b, 0])
        before_HW = network(batch.x[0][b : b + 1]).similarity_BPHW[0, p]
        x0, y0, x1, y1 = (boxes_in(network, before_HW[None])[0] * SIDE).round().int().tolist()
        pasted = batch.x[0][b - 1].clone()
        pasted[:, y0:y1, x0:x1] = batch.x[0][b][:, y0:y1, x0:x1]
        after_HW = network(pasted[None]).similarity_BPHW[0, p]
        expected.append(float((after_HW.flatten()[before_HW.argmax()] / before_HW.max()).detach()))
    assert similarity_kept(batch).tolist() == pytest.approx(expected, rel=1e-4)


def test_gradient_energy_lies_where_the_network_looks() -> None:
    shares = {}
    for backbone in (Local(), Everywhere()):
        batch = red_and_green(backbone)
        metric = ReceptiveField(batch.subject)
        metric.collect(batch)
        shares[backbone.name] = metric.figures()[0].value or 0
    area = float((batch.evidence.box_BE4[:, 0, 2:] - batch.evidence.box_BE4[:, 0, :2]).prod(1).mean())
    # The cell sees itself alike: the share of its energy in the box is the share of its pixels in the box.
    assert shares["local"] == pytest.approx(area * MAP * MAP, rel=0.02)
    assert shares["everywhere"] < shares["local"]
    uniform = torch.ones(1, 3, 20, 20)
    assert float(energy_inside(uniform, torch.tensor([[0.0, 0.0, 0.5, 0.25]]))) == pytest.approx(0.125)


# --- evidence ---------------------------------------------------------------------------------------------------


def test_curves_are_those_of_hiding_and_showing_by_hand() -> None:
    generator = torch.Generator().manual_seed(3)
    weight_KP = torch.tensor([[1.0, 0.7, 0.4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.7, 0.4]])
    colours = torch.rand(6, 3, generator=generator).tolist()
    network = colour_network(Local(), colours, [0, 0, 0, 1, 1, 1], weight_KP)
    x_B3HW = torch.rand(4, 3, MAP, MAP, generator=generator).repeat_interleave(32, 2).repeat_interleave(32, 3)
    batch = picture_batch(network, x_B3HW, [0, 1, 0, 1])
    seen = reveal(batch)
    for b in range(4):
        output = network(x_B3HW[b : b + 1])
        predicted = int(output.logits_BK.argmax())
        points = (output.score_BP[0] * network.last_layer.weight[predicted]).tolist()
        order = [p for p in sorted(range(6), key=lambda p: -points[p]) if points[p] > 0]
        boxes = [boxes_in(network, output.similarity_BPHW[0, p][None])[0].tolist() for p in order]
        for step, count in enumerate(STEPS):
            inside = torch.zeros(SIDE, SIDE, dtype=torch.bool)
            for x0, y0, x1, y1 in boxes[:count]:
                inside[round(y0 * SIDE) : round(y1 * SIDE), round(x0 * SIDE) : round(x1 * SIDE)] = True
            for show, curve in ((True, seen.shown), (False, seen.hidden)):
                mixed = torch.where(inside == show, x_B3HW[b], blurred(x_B3HW[b : b + 1])[0])
                logits = network(mixed[None]).logits_BK[0]
                assert float(curve.probability_LB[step, b]) == pytest.approx(
                    float(logits.softmax(0)[predicted].detach()), 1e-4
                )
                assert bool(curve.kept_LB[step, b]) == (int(logits.argmax()) == predicted)
            assert float(seen.shown.area_LB[step, b]) == pytest.approx(float(inside.float().mean()))


def test_hiding_the_only_evidence_hurts_more_than_hiding_something_else() -> None:
    batch = red_and_green(Local(), off=0.0)
    metrics = Deletion(batch.subject), Leakage(batch.subject)
    for metric in metrics:
        metric.collect(batch)
    deletion, below_random, _, above_random = metrics[0].figures()
    assert below_random.value is not None
    assert above_random.value is not None
    assert below_random.value > 0.02
    assert above_random.value > 0.02
    alone, _ = metrics[1].figures()
    assert alone.value == 1.0
    assert deletion.value is not None


def test_blur_keeps_the_mean_of_a_flat_picture_and_random_boxes_keep_their_sizes() -> None:
    assert blurred(torch.full((1, 3, 24, 40), 0.3)).allclose(torch.tensor(0.3))
    box_BE4 = torch.tensor([[[0.1, 0.2, 0.5, 0.3], [0.0, 0.0, 1.0, 1.0]]]).repeat(200, 1, 1)
    random_BE4 = elsewhere(box_BE4, torch.Generator().manual_seed(0))
    assert (random_BE4[..., 2:] - random_BE4[..., :2]).allclose(box_BE4[..., 2:] - box_BE4[..., :2], atol=1e-6)
    assert random_BE4.min() >= 0
    assert random_BE4.max() <= 1
    assert random_BE4[:, 0, 0].std() > 0.1


def test_points_from_the_background_are_those_whose_peak_lies_outside_the_object() -> None:
    maps = torch.stack([spot(0.1, 0.1) * 3, spot(0.6, 0.6), spot(0.9, 0.9) * 9])[None].repeat(2, 1, 1, 1)
    objects = torch.tensor([[0.5, 0.5, 0.8, 0.8], [0.0, 0.0, 1.0, 1.0]])  # the second one fills the picture
    nothing = torch.full((2, 1, 4), math.nan)
    weight_KP = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]])
    batch = case(maps, [0, 0], [0, 0, 1], weight_KP, part_BQ4=nothing, object_B4=objects)
    metric = Background(batch.subject)
    metric.collect(batch)
    (figure,) = metric.figures()
    assert figure.value == pytest.approx(0.75)
    assert figure.note.startswith("1 images")


def test_a_mask_says_more_than_the_box_around_it(tmp_path: Path) -> None:
    """Masks like an L and a J: the corners that they leave out are background."""
    maps = torch.stack([spot(0.1, 0.1) * 3, spot(0.6, 0.6), spot(0.9, 0.9) * 9])[None].repeat(3, 1, 1, 1)
    weight_KP = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]])
    batch = case(maps, [0, 0, 0], [0, 0, 1], weight_KP)
    drawn = np.zeros((64, 64), np.uint8)
    drawn[:, :20] = drawn[44:, :] = 200
    Image.fromarray(drawn).save(tmp_path / "l.png")
    mirrored = np.zeros((64, 64), np.uint8)
    mirrored[:, 32:] = mirrored[44:, :] = 1
    Image.fromarray(mirrored).save(tmp_path / "j.png")
    masks = ("l.png", "j.png", None)
    samples = tuple(replace(sample, mask=mask) for sample, mask in zip(batch.subject.samples, masks, strict=True))
    batch.subject = replace(batch.subject, root=tmp_path, samples=samples)
    metric = Background(batch.subject)
    metric.collect(batch)
    (figure,) = metric.figures()
    assert figure.value == pytest.approx((1 / 4 + 3 / 4) / 2), "three points lie at the top left, one near the middle"
    covered = np.mean([drawn > 0, mirrored > 0])
    assert figure.note == f"2 images; the background is {1 - covered:.1%} of the picture"
    unknown = Background(batch.subject)
    assert unknown.figures()[0].note == "the data has neither masks nor boxes of the objects"


# --- prototypes -------------------------------------------------------------------------------------------------


def test_duplicates_unused_and_mixed_prototypes_are_counted() -> None:
    weight_KP = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    network = colour_network(Local(), [RED, RED, BLUE, GREY], [0, 0, 1, 1], weight_KP)
    x_B3HW = painted({(0, 0): RED}, {(0, 1): RED}, {(1, 1): GREEN}, {(2, 2): GREEN})
    batch = picture_batch(network, x_B3HW, [0, 0, 1, 1])
    metric = Redundancy(batch.subject)
    for rows in (torch.tensor([0, 2]), torch.tensor([1, 3])):
        piece = picture_batch(network, x_B3HW[rows], [0, 1])
        metric.collect(piece)
    duplicates, unused, mixed = metric.figures()
    assert (duplicates.value, unused.value) == (0.25, 0.25)
    # The two nearest pictures of red are those of class 0. Grey is in every picture alike, blue in none.
    score_NP, own_NP = batch.clean.score_BP, batch.label_B[:, None] == batch.subject.class_P
    nearest_2P = score_NP.topk(2, dim=0).indices
    assert mixed.value == float((own_NP.gather(0, nearest_2P).float().mean(0) < 0.5).float().mean())


def test_peaks_are_those_of_the_loops() -> None:
    generator = np.random.default_rng(0)
    map_SHW = torch.from_numpy(generator.random((5, 3, 4))).float()
    for map_HW, (x, y) in zip(map_SHW, peaks_of_maps(map_SHW, (30, 50)).tolist(), strict=True):
        pixels = upsample(map_HW[None], (30, 50))[0].tolist()
        best = max((value, -row, -column) for row, line in enumerate(pixels) for column, value in enumerate(line))
        assert (x, y) == pytest.approx(((-best[2] + 0.5) / 50, (-best[1] + 0.5) / 30))
