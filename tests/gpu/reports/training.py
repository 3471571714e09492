"""Public reports of training in other libraries: strides of gradients, in-place checks, checkpoints, tied weights."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as ck
from torch._dynamo.backends.common import aot_autograd

import cutlass_ops as co

bf = torch.bfloat16
torch.manual_seed(0)


def say(ok, *what):
    print("PASS" if ok else "FAIL", *what, flush=True)


def rel(d, r):
    return ((d.double() - r.double()).norm() / r.double().norm().clamp(min=1e-30)).item()


M, N, K = 256, 512, 256
x, w, b = [
    t.requires_grad_()
    for t in (
        torch.randn(M, K, device="cuda", dtype=bf),
        torch.randn(N, K, device="cuda", dtype=bf) * 0.1,
        torch.randn(N, device="cuda", dtype=bf),
    )
]


def op(x):
    return co.gemm_bias_gelu(x, w.t(), b)


def ref(x):
    return F.gelu(x.double() @ w.double().t() + b.double())


co.warm_up(co.gemm_bias_gelu, x, w.t(), b)
y0 = torch.randn(M, N, device="cuda")
for name, f in {
    "sum": lambda d: d.sum(),
    "cat": lambda d: (torch.cat([d, d * 2], 1) ** 2).sum(),
    "transpose": lambda d: (d.t() * torch.arange(M, device="cuda")).sum(),
    "chunk": lambda d: (d.chunk(2, 1)[1] ** 2).sum(),
    "mean": lambda d: (d.mean(0) * y0[0]).sum(),
    "index": lambda d: d[::2, 1::3].pow(2).sum(),
}.items():
    e = [
        rel(p, q)
        for p, q in zip(
            torch.autograd.grad(f(op(x)), [x, w, b]), torch.autograd.grad(f(ref(x)), [x, w, b]), strict=False
        )
    ]
    say(max(e) < 0.01, "pytorch#194719 gradient of", name, max(e))
for how in (None, "inductor"):
    f = op if how is None else torch.compile(op, backend=how)
    xx = x * 1.0
    y = f(xx)
    with torch.no_grad():
        xx.add_(1)
    try:
        y.float().sum().backward()
        say(False, "pytorch#197887", how, "no error")
    except RuntimeError as exc:
        say("inplace" in str(exc), "pytorch#197887", how)
g0 = torch.autograd.grad(op(x).float().pow(2).sum(), [x, w, b])
for reentrant in (True, False):
    for t in (x, w, b):
        t.grad = None
    ck.checkpoint(lambda x: op(x).view(2, M // 2, -1).relu_(), x * 1, use_reentrant=reentrant).float().pow(
        2
    ).sum().backward()
    r = torch.autograd.grad(op(x).relu().float().pow(2).sum(), [x, w, b])
    say(
        all(rel(p.grad, q) < 0.01 for p, q in zip((x, w, b), r, strict=False)),
        "pytorch#36383 checkpoint, reentrant",
        reentrant,
    )


def policy(ctx, op, *a, **k):
    return ck.CheckpointPolicy.MUST_SAVE if "fused_gemm" in str(op) else ck.CheckpointPolicy.PREFER_RECOMPUTE


y = ck.checkpoint(
    op, x, use_reentrant=False, context_fn=functools.partial(ck.create_selective_checkpoint_contexts, policy)
)
g = torch.autograd.grad(y.float().pow(2).sum(), [x, w, b])
say(all(rel(p, q) < 1e-3 for p, q in zip(g, g0, strict=False)), "pytorch#153334 selective checkpoint")
layers = [co.nn.Linear(K, K, bias=False, device="cuda", dtype=bf) for _ in range(2)]
layers[1].weight = layers[0].weight
p = layers[0].weight
p.main_grad = torch.zeros(K, K, device="cuda")
q = p.detach().double().requires_grad_()
parts = x.detach().split(64)
for part in parts:
    layers[1](layers[0](part)).float().pow(2).mean().backward()
    ((part.double() @ q.t()) @ q.t()).pow(2).mean().backward()
say(
    p.grad is None and rel(p.main_grad, q.grad) < 0.01,
    "TE#3437 tied weights, four parts of a batch",
    rel(p.main_grad, q.grad),
)
mlp = co.nn.MLP(K, N, device="cuda", dtype=bf)
mlp.fc1.weight = torch.nn.Parameter(mlp.fc1.weight.data.as_subclass(type("Named", (torch.Tensor,), {})))

seen = []
# The check refuses transposed tensors of such a class, those of PyTorch's own operators as well.
with torch._functorch.config.patch(check_custom_op_aliasing=False):
    torch.compile(
        mlp,
        backend=aot_autograd(fw_compiler=lambda gm, i: (seen.append([str(n.target) for n in gm.graph.nodes]), gm)[1]),
        fullgraph=True,
    )(x)
say(
    sum("fused_gemm" in s for s in seen[0]) == 2 and not any("gelu" in s or "addmm" in s for s in seen[0]),
    "a compiled MLP whose weight has a class of its own is two fused calls",
)
