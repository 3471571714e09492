"""Public reports of groups in other libraries: NaN in rows of no expert, experts without rows, no token, odd counts."""

import torch

import cutlass_ops as co

bf = torch.bfloat16
torch.manual_seed(0)


def say(ok, *what):
    print("PASS" if ok else "FAIL", *what, flush=True)


def offs(*c):
    return torch.tensor(c, device="cuda").cumsum(0, dtype=torch.int32)


T, E, K, N = 300, 4, 256, 128


@co.epilogue
def f(acc, bias: co.Row, col: co.Col):
    return co.e.silu(acc + bias) * col


o = offs(100, 0, 130, 0)  # 70 rows of no expert, two experts without rows


def leaves(nan):
    g = torch.Generator("cuda").manual_seed(1)

    def r(*s):
        return torch.randn(*s, device="cuda", generator=g)

    x, w, b, c = r(T, K).to(bf), r(E, N, K).to(bf) * 0.1, r(E, N), r(T)
    gr = r(T, N).to(bf)
    if nan:
        x[230:] = float("nan")
        c[230:] = float("inf")
        gr[230:] = float("nan")
    return [t.requires_grad_() for t in (x, w, b, c)], gr


def step(nan):
    t, gr = leaves(nan)
    d = co.gemm(t[0], t[1].mT, groups=co.Groups(o), epilogue=f, bias=t[2], col=t[3])
    return d[:230], torch.autograd.grad(d, t, gr)


t, _ = leaves(False)
co.warm_up(co.gemm, t[0], t[1].mT, groups=co.Groups(o), epilogue=f, bias=t[2], col=t[3])
torch.empty(1 << 28, device="cuda").fill_(float("nan"))
d0, g0 = step(False)
for _again in range(2):  # recycled memory, which is full of NaN
    waste = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del waste
    d1, g1 = step(True)
    names = ["x", "w", "bias", "col"]
    say(
        torch.equal(d0, d1) and all(torch.equal(p, q) for p, q in zip(g0, g1, strict=False)),
        "pytorch#193633 NaN in rows of no expert",
        [n for n, p, q in zip(names, g0, g1, strict=False) if not torch.equal(p, q)],
    )
say(
    all(g.isfinite().all() for g in g1)
    and not g1[0][230:].any()
    and not g1[1][[1, 3]].any()
    and not g1[2][[1, 3]].any(),
    "pytorch#172439 zeros for experts without rows",
)
z = torch.zeros(E, device="cuda", dtype=torch.int32)
x0 = torch.empty(0, K, device="cuda", dtype=bf, requires_grad=True)
w = t[1].detach().requires_grad_()
d = co.gemm(x0, w.mT, groups=co.Groups(z))
d.float().sum().backward()
say(tuple(d.shape) == (0, N) and w.grad is not None and not w.grad.any(), "TE#3019, pytorch#192497 no tokens at all")
x, s = torch.randn(T, K, device="cuda", dtype=bf), torch.rand(T, 1, device="cuda", dtype=bf) + 0.5
full = offs(100, 50, 100, 50)
w = t[1].detach()
co.warm_up(co.gemm, x, w.mT, groups=co.Groups(full))
one = co.gemm(x / s, w.mT, groups=co.Groups(full))
say(
    all(torch.equal(co.gemm(x / s, w.mT, groups=co.Groups(full)), one) for _ in range(20)),
    "pytorch#186365 the same bits in a loop; the last offset is T",
)
room, pad = 64, torch.randn(E, 64, K, device="cuda", dtype=bf)
for c in ((0, 0, 0, 0), (1, 0, 64, 7), (-1, 3, 99, 8)):
    counts = torch.tensor(c, device="cuda", dtype=torch.int32)
    out = torch.full((E, room, N), 7.0, device="cuda", dtype=bf)
    co.gemm(pad, w.mT, groups=co.Groups(counts=counts), out=out)
    r = pad.double() @ w.mT.double()
    used = [max(0, min(room, n)) for n in c]
    ok = all(
        (out[e, :n].double() - r[e, :n]).norm() <= 5e-3 * r[e, :n].norm() and (out[e, n:] == 7).all()
        for e, n in enumerate(used)
    )
    say(ok, "DeepGEMM#38, #268 counts", c)
try:
    co.gemm(pad, w.mT, groups=co.Groups(counts=torch.tensor([1, 2, 3, 4], dtype=torch.int32)))
    say(False, "DeepGEMM#97 counts on the CPU: no error")
except (ValueError, TypeError) as exc:
    say("cpu" in str(exc) and "counts" in str(exc), "DeepGEMM#97", exc)
