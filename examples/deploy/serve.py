"""The program in the container: load the bundle, run a layer, print the times.

python examples/deploy/serve.py [BUNDLE] [PUBLIC_KEY] [--no-collect]

With a GPU, the layer runs on the bundle's kernels, or without a bundle on those of an installed distribution. Without a
GPU, ops compute in PyTorch, and an exact kernel of the bundle says why it cannot run.
"""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

started = time.perf_counter()
import torch  # noqa: E402

torch_there = time.perf_counter()

sys.path.insert(0, str(Path(__file__).parent))


def said(device: str, before: dict[str, float], times: dict[str, float]) -> str:
    """Return the times until the first result as text; arguments are seconds by name."""
    parts = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in times.items())
    rest = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in before.items())
    return f"first result on {device} after {1000 * sum(times.values()):.0f} ms ({parts})\nbefore that: {rest}"


def show_more(bundle: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Run a layer with the epilogue of this folder, and without a GPU an exact kernel, which refuses."""
    from epilogues import scaled_swish

    import cutlass_ops as co

    swish = co.gemm(x, weight.t(), epilogue=scaled_swish, bias=bias, scale=0.5)
    print(f"mean of the second layer: {float(swish.mean()):.4f}")
    if x.is_cuda:
        return
    spec = next(kernel.spec for kernel in bundle.kernels() if kernel.spec.epilogue == co.gemm_bias_relu.graph)
    try:
        co.build(spec)(x, weight.t(), bias)
    except co.errors.NoDeviceError as exc:
        print(f"no GPU: {exc}")
    else:
        sys.exit("an exact kernel ran without a GPU")


def main() -> None:
    """Serve one layer."""
    parser = argparse.ArgumentParser(description="Serve one layer from a bundle, and print the times.")
    parser.add_argument("bundle", type=Path, nargs="?", help="by default, an installed distribution serves")
    parser.add_argument("key", type=Path, nargs="?", help="PEM file of the public key that must have signed")
    parser.add_argument("--no-collect", action="store_true", help="do not collect garbage before the call")
    args = parser.parse_args()
    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(512, 1024, device=device, dtype=torch.bfloat16)
    weight = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    bias = torch.randn(1024, device=device, dtype=torch.bfloat16)
    expected = torch.relu(torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    if device == "cuda":
        torch.cuda.synchronize()
    device_there = time.perf_counter()

    # After PyTorch's import, Python's next full collection takes 0.1 s, so run it before the clock starts.
    if not args.no_collect:
        gc.collect()

    # The clock covers this library's import, the bundle and the first result.
    began = time.perf_counter()
    import cutlass_ops as co

    imported = time.perf_counter()
    bundle = None if args.bundle is None else co.load_bundle(args.bundle, public_key=args.key)
    opened = time.perf_counter()
    d = co.gemm_bias_relu(x, weight.t(), bias)
    if device == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()

    error = float((d.double() - expected).abs().max() / expected.abs().max())
    if bundle is None:
        print(f"served by: {', '.join({entry.kernel.artifact.origin for entry in co.registry.entries()}) or 'PyTorch'}")
    else:
        print(f"{len(bundle.kernels())} kernels for {', '.join(bundle.manifest.targets)} in {args.bundle.name}")
    times = {"import": imported - began, "bundle": opened - imported, "call": ended - opened}
    before = {"PyTorch's import": torch_there - started, "the device's start": device_there - begun}
    print(said(device, before, times))
    print(f"largest error: {error:.1e} of the largest value")
    if bundle is not None:
        show_more(bundle, x, weight, bias)
    if error > 2**-7:
        sys.exit(f"the error is too large: {error}")


if __name__ == "__main__":
    main()
