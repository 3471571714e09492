"""What a cross-entropy needs of its logits, from the kernel that computes them: no pass over the logits follows.

Columns beyond the vocabulary only fill the weight up to a size that kernels like. They are masked by their index.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co

TOKENS, VOCABULARY, PADDED, HIDDEN = 96, 1000, 1024, 256


class Statistics(NamedTuple):
    """The logits, and of each token's: the greatest, where it is, and the logarithm of the sum of exponentials."""

    d: co.types.Value
    most: co.types.Reduction
    prediction: co.types.Reduction
    lse: co.types.Reduction


@co.epilogue
def masked_statistics(acc, vocabulary: co.Scalar) -> Statistics:  # noqa: ANN001
    """D = the logits, −∞ beyond the vocabulary, with three statistics of each row."""
    logits = co.e.where(co.e.column_index() < vocabulary, acc, float("-inf"))
    return Statistics(logits, co.e.max(logits, 1), co.e.argmax(logits, 1), co.e.logsumexp(logits, 1))


def main() -> None:
    """Compute a loss from the statistics, and compare it with PyTorch's in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).to(device, torch.bfloat16)
    weight = (0.5 * torch.randn(PADDED, HIDDEN)).to(device, torch.bfloat16)
    target = torch.randint(VOCABULARY, (TOKENS,), device=device)

    logits, most, prediction, lse = co.gemm(
        hidden, weight.t(), epilogue=masked_statistics, vocabulary=VOCABULARY, out_dtype=torch.float32
    )
    loss = (lse - logits.gather(1, target[:, None])[:, 0]).mean()

    exact = hidden.double() @ weight[:VOCABULARY].double().t()
    error = abs(loss.item() - F.cross_entropy(exact, target).item())
    print(f"logits {tuple(logits.shape)}, {most.shape[0]} tokens, on {device}")
    print(f"loss {loss.item():.6f}, off by {error:.1e}")
    print(f"{(prediction == exact.argmax(1)).sum().item()} of {TOKENS} predictions are those of float64")
    wrong = (prediction != exact.argmax(1)).any() or not torch.allclose(most.double(), exact.amax(1), rtol=1e-5)
    if error > 1e-4 or wrong:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
