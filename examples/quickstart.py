"""The first thing to run: relu(x @ W.T + bias) as one kernel.

With a GPU the kernel runs. Without one, the Hopper kernel is generated, compiled and examined, and the result comes
from the reference implementation, which is what the library does with tensors on the CPU.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co

M, N, K = 512, 1024, 2048

KERNEL = co.KernelSpec(
    a="bf16.row",
    b="bf16.col",
    d="bf16.row",
    epilogue=co.gemm_bias_relu,
    config=co.Sm90Config(
        threadblock=co.ThreadblockShape(128, 128, 64), cluster=co.ClusterShape(2, 1), schedule="pingpong"
    ),
)


def tensors(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x (M, K), and a linear layer's weight (N, K) and bias (N,)."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(M, K), torch.randn(N, K) / K**0.5, torch.randn(N)
    return tuple(t.to(device, torch.bfloat16) for t in (x, weight, bias))


def compare(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Compute the layer with this library and with PyTorch, and compare both with float64."""
    ours = co.gemm_bias_relu(x, weight.t(), bias)
    torchs = F.relu(F.linear(x, weight, bias))
    exact = F.relu(F.linear(x.double(), weight.double(), bias.double()))
    error, torch_error = ((d.double() - exact).abs().max().item() for d in (ours, torchs))
    print(f"largest error against float64: {error:.2e}; PyTorch's own: {torch_error:.2e}")
    if error > 2 * torch_error:
        sys.exit("the result is wrong")


def with_gpu() -> None:
    """Run the op. The first call compiles the kernel."""
    x, weight, bias = tensors("cuda")
    print(f"relu(x @ W.T + bias), M {M}, N {N}, K {K}, bfloat16, on {torch.cuda.get_device_name()}")
    compare(x, weight, bias)
    print(f"kernel: {co.gemm_bias_relu.plan(x, weight.t(), bias).spec.slug}")


def without_gpu() -> None:
    """Compile one kernel, show its Tensor Core instructions, and compute with the reference."""
    print(
        "There is no GPU here, so a Hopper (sm_90a) kernel is compiled and examined, which takes a minute:", flush=True
    )
    began = time.monotonic()
    artifact = co.build(KERNEL).loaded.artifact
    sass = artifact.manifest["sass"]
    print(f"kernel: {KERNEL.slug}")
    print(f"source: {artifact.source}, {len(co.source(KERNEL).splitlines())} lines")
    print(f"library: {artifact.library}, after {time.monotonic() - began:.0f} s")
    print(f"its machine code holds {sass['HGMMA']} HGMMA (Tensor Cores) and {sass['UTMALDG']} UTMALDG (TMA loads)")
    print(f"relu(x @ W.T + bias), M {M}, N {N}, K {K}, bfloat16, by the reference implementation on the CPU:")
    compare(*tensors("cpu"))


if __name__ == "__main__":
    try:
        with_gpu() if torch.cuda.is_available() else without_gpu()
    except co.CutlassOpsError as exc:
        sys.exit(f"{exc}\nSee `python -m cutlass_ops doctor`.")
