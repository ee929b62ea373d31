"""CaBRNet's half of compare_cabrnet.py, run by the interpreter of an environment that has the `cabrnet` package.

Reads "step" or "project" from its input, line by line, and answers with the seconds that took.
"""

import json
import sys
import time

import torch
from cabrnet.archs.generic.model import CaBRNet
from loguru import logger
from torch.utils.data import DataLoader, TensorDataset


def build(size: dict):
    add_on = {"conv1": {"type": "Conv2d", "params": {"out_channels": size["latent_width"], "kernel_size": 1}},
              "relu1": {"type": "ReLU"},
              "conv2": {"type": "Conv2d", "params": {"in_channels": size["latent_width"],
                                                     "out_channels": size["latent_width"], "kernel_size": 1}},
              "sigmoid1": {"type": "Sigmoid"}}  # fmt: skip
    classifier = {"num_classes": size["classes"], "num_features": size["latent_width"],
                  "num_proto_per_class": size["per_class"], "proto_init_mode": "UNIFORM"}  # fmt: skip
    return CaBRNet.build_from_config(
        {
            "extractor": {
                "backbone": {"arch": size["backbone"], "weights": "None"},
                "convnet": {"source_layer": "layer4", "add_on": add_on},
            },
            "classifier": {
                "module": "cabrnet.archs.protopnet.decision",
                "name": "ProtoPNetClassifier",
                "params": classifier,
            },
            "similarity": {"name": "ProtoPNetSimilarity"},
            "top_arch": {"module": "cabrnet.archs.protopnet.model", "name": "ProtoPNet"},
        }
    )


def main() -> None:
    size = json.loads(sys.argv[1])
    logger.remove()
    torch.manual_seed(0)
    torch.set_num_threads(size["threads"])
    model = build(size)
    model.classifier.last_layer.requires_grad_(False)  # as in joint training
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    x_N3HW = torch.rand(size["images"], 3, size["input_size"], size["input_size"])
    label_N = torch.arange(size["images"]) % size["classes"]
    loader = DataLoader(TensorDataset(x_N3HW, label_N), batch_size=size["pass_batch"])

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        loss, _ = model.loss(model(x_N3HW[: size["batch"]]), label_N[: size["batch"]])
        loss.backward()
        optimizer.step()

    def project() -> None:
        model.project(loader, device="cpu", update_prototypes=False)

    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        {"step": step, "project": project}[line.strip()]()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
