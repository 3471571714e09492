"""Inference on real data: a small network for handwritten digits, trained in PyTorch, run through fused GEMMs.

The data is scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits" test set: 1,797 images of 8x8
pixels. Each layer is one kernel on a GPU, and the reference implementation on the CPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import cutlass_ops as co

DTYPE = torch.float16
HIDDEN = 128
CLASSES = 16  # ten digits, and six outputs that never win: a multiple of 8 keeps every operand aligned to 16 bytes


def data() -> tuple[Tensor, Tensor]:
    """Return images (1797, 64) in 0…1 and labels (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)


def train(images: Tensor, labels: Tensor) -> nn.Sequential:
    """Train the network on images and labels."""
    model = nn.Sequential(
        nn.Linear(images.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def fused(model: nn.Sequential, x: Tensor) -> Tensor:
    """Run the network's layers as fused GEMMs. B is the transpose of a layer's weight (N, K)."""
    first, _, second, _, last = model
    x = co.gemm_bias_relu(x, first.weight.t(), first.bias)
    x = co.gemm_bias_relu(x, second.weight.t(), second.bias)
    return co.gemm_bias(x, last.weight.t(), last.bias)


def milliseconds(function: Callable[[], Tensor]) -> float:
    """Return the median time of a call, including the device's work."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Train, predict both ways, compare and time."""
    torch.manual_seed(0)
    images, labels = data()
    order = torch.randperm(len(images))
    training, test = order[:1200], order[1200:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = train(images[training], labels[training]).to(device, DTYPE)
    x = images.to(device, DTYPE)
    with torch.inference_mode():
        theirs, ours = model(x).argmax(1), fused(model, x).argmax(1)
        torch_ms, our_ms = milliseconds(lambda: model(x)), milliseconds(lambda: fused(model, x))
    correct = (ours.cpu()[test] == labels[test]).sum().item()
    same = (ours == theirs).sum().item()
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, by the reference implementation"
    print(f"digits recognised: {correct} of {len(test)} test images")
    print(f"same prediction as the PyTorch model in {DTYPE}: {same} of {len(x)} images")
    print(f"median time for {len(x)} images on {where}: {our_ms:.3f} ms; PyTorch's modules: {torch_ms:.3f} ms")
    if same != len(x):
        sys.exit("the predictions differ")


if __name__ == "__main__":
    main()
