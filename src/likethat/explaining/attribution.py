"""Where in a picture the similarity to a prototype comes from.

The paper upsamples the map of similarities: a patch of the latent map stands for its cell of the picture, though the
network may have looked far around it. The other two ask the network itself. Both attribute the similarity at the one
patch that a prototype matched, and both take a picture of nothing but its mean colour for the absence of evidence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from likethat.errors import UserError
from likethat.models.protopnet import ProtoPNet
from likethat.runtime import seed_for

UPSAMPLING, GRADIENT, OCCLUSION = "upsampling", "gradient", "occlusion"
TITLES = {UPSAMPLING: "Activation map", GRADIENT: "Gradient x input", OCCLUSION: "Occlusion"}

STEPS = 8  # noisy pictures that gradients are averaged over
NOISE = 0.05  # its standard deviation, of pixels from 0 to 1
FINE = 56  # rows and columns of a map of gradients, at most
BLUR = 3.0  # of them: single pixels mean nothing
AT_ONCE = {"cpu": 1, "mps": 1, "cuda": 16}  # prototypes in one backward pass; a CPU is quickest one by one

GRID = 14  # rows and columns of a map of occlusions, at most
WINDOW = 3  # of them hidden at a time, each way
BATCH = {"cpu": 8, "mps": 32, "cuda": 128}  # more at once is slower on a CPU


def check_method(method: str) -> None:
    if method not in TITLES:
        raise UserError(f"There is no attribution called '{method}'; choose one of {', '.join(TITLES)}.")


def attribute(
    network: ProtoPNet, x_3HW: Tensor, chosen_p: Tensor, method: str, patch_p: Tensor | None = None, *, step: int = 1
) -> Tensor:
    """Return one map for each of these prototypes, p x rows x columns: how much each part of the picture adds to the
    similarity, at the patch that matches or at `patch_p`. `x_3HW` is what the network sees, in [0, 1]; windows of
    occlusion lie `step` cells apart."""
    check_method(method)
    with torch.no_grad():
        output = network(x_3HW[None])
        distance_pHW = output.distance_BPHW[0, chosen_p]
    if method == UPSAMPLING:
        return output.of_distance(distance_pHW)
    patch_p = distance_pHW.flatten(1).argmin(1) if patch_p is None else patch_p
    if method == OCCLUSION:
        return occlusion(network, x_3HW, chosen_p, patch_p, step).clamp(min=0)
    # On the CPU: MPS pools only into sizes that divide the picture's.
    return smooth(gradient_times_input(network, x_3HW, chosen_p, patch_p).cpu()).clamp(min=0)


def flat(x_3HW: Tensor) -> Tensor:
    """Return the picture's mean colour everywhere."""
    return x_3HW.mean((1, 2), keepdim=True).expand_as(x_3HW)


def similarity_at(network: ProtoPNet, x_B3HW: Tensor, chosen_p: Tensor, patch_p: Tensor) -> Tensor:
    """Return, B x p, the similarity of each chosen prototype to its one patch of each picture."""
    output = network(x_B3HW)
    distance_BpN = output.distance_BPHW[:, chosen_p].flatten(2)
    place_Bp1 = patch_p[None, :, None].expand(len(x_B3HW), -1, 1)
    return output.of_distance(distance_BpN.gather(2, place_Bp1)[..., 0])


def gradient_times_input(
    network: ProtoPNet, x_3HW: Tensor, chosen_p: Tensor, patch_p: Tensor, steps: int = STEPS, noise: float = NOISE
) -> Tensor:
    """Return, p x H x W, the mean gradient over noisy pictures on the way from the flat picture to this one, times the
    difference of the two. Without noise and with many steps a map adds up to the difference of the similarities."""
    generator = torch.Generator().manual_seed(seed_for("attribution"))
    noise_s3HW = noise * torch.randn((steps, *x_3HW.shape), generator=generator).to(x_3HW.device)
    way_s111 = ((torch.arange(steps) + 0.5) / steps).to(x_3HW)[:, None, None, None]
    difference_3HW = x_3HW - flat(x_3HW)
    x_s3HW = (flat(x_3HW) + way_s111 * difference_3HW + noise_s3HW).requires_grad_()
    with torch.enable_grad():
        similarity_p = similarity_at(network, x_s3HW, chosen_p, patch_p).sum(0)
    maps = []
    for one_qp in torch.eye(len(chosen_p), device=x_3HW.device).split(AT_ONCE[x_3HW.device.type]):
        (gradient_qs3HW,) = torch.autograd.grad(
            similarity_p, x_s3HW, grad_outputs=one_qp, is_grads_batched=True, retain_graph=True
        )
        maps.append((gradient_qs3HW.mean(1) * difference_3HW).sum(1))
    return torch.cat(maps)


def smooth(map_pHW: Tensor) -> Tensor:
    """Average maps over small cells, and over neighbouring cells."""
    rows, columns = (min(FINE, side) for side in map_pHW.shape[1:])
    cell_pHW = F.adaptive_avg_pool2d(map_pHW[:, None], (rows, columns))
    kernel = 2 * min(round(3 * BLUR), (min(rows, columns) - 1) // 2) + 1
    return gaussian_blur(cell_pHW, [kernel, kernel], [BLUR, BLUR])[:, 0]


@torch.no_grad()
def occlusion(network: ProtoPNet, x_3HW: Tensor, chosen_p: Tensor, patch_p: Tensor, step: int = 1) -> Tensor:
    """Return, p x rows x columns, how much similarity is lost when a window over the cell is painted with the mean
    colour, averaged over all windows that cover the cell. One pass over the pictures serves all prototypes."""
    hidden_wHW, cover_wHW = _windows(x_3HW.shape[1:], step)
    hidden_wHW, cover_wHW = hidden_wHW.to(x_3HW.device), cover_wHW.to(x_3HW)
    whole_p = similarity_at(network, x_3HW[None], chosen_p, patch_p)[0]
    left_wp = torch.cat(
        [
            similarity_at(network, torch.where(mask_BHW[:, None], flat(x_3HW), x_3HW), chosen_p, patch_p)
            for mask_BHW in hidden_wHW.split(BATCH[x_3HW.device.type])
        ]
    )
    lost_pHW = torch.einsum("wp,whx->phx", whole_p - left_wp, cover_wHW)
    return lost_pHW / cover_wHW.sum(0)


def _windows(size_hw: torch.Size, step: int) -> tuple[Tensor, Tensor]:
    """Return every window as the pixels and as the cells it hides. Windows begin before the first cell and end behind
    the last one, so that each cell lies in equally many where they are one cell apart."""
    axes = []
    for side in size_hw:
        cells = min(GRID, side)
        cell_n = torch.arange(side) * cells // side  # the cell of each pixel
        first_s = torch.arange(1 - WINDOW, cells, step)[:, None]
        pixel_sn = (cell_n >= first_s) & (cell_n < first_s + WINDOW)
        cell_sc = (torch.arange(cells) >= first_s) & (torch.arange(cells) < first_s + WINDOW)
        axes.append((pixel_sn, cell_sc))
    pixels, cells = (
        (along_y[:, None, :, None] & along_x[None, :, None, :]).flatten(0, 1)
        for along_y, along_x in zip(*axes, strict=True)
    )
    return pixels, cells
