"""Public reports of FP8 in other libraries: scales at the end of memory, zeros, saturation, odd blocks."""

import torch

import cutlass_ops as co

bf, e4 = torch.bfloat16, torch.float8_e4m3fn
torch.manual_seed(0)


def say(ok, *what):
    print("PASS" if ok else "FAIL", *what, flush=True)


def walled(t):  # memory of NaN around a tensor: reading one element too far shows
    room = torch.full((t.numel() + 2048,), float("nan"), device="cuda")
    room[1024:-1024] = t.flatten().float()
    return room[1024:-1024].view(t.shape)


def rel(d, r):
    return ((d.double() - r).norm() / r.norm()).item()


# Scales of rows and columns, with M and N that fill no tile.
for m, n, k in ((8352 % 4096 + 1, 1536, 512), (129, 136, 128), (1, 1000, 256)):
    a, b = torch.randn(m, k, device="cuda").to(e4), torch.randn(n, k, device="cuda").to(e4)
    sa, sb = walled(torch.rand(m, device="cuda") + 0.5), walled(torch.rand(n, device="cuda") + 0.5)
    args = co.Scaled(a, sa), co.Scaled(b.t(), sb)
    co.warm_up(co.gemm, *args)
    r = (a.double() * sa.double()[:, None]) @ (b.double() * sb.double()[:, None]).t()
    e = rel(co.gemm(*args), r)
    say(e < 5e-3, "pytorch#133334 rows and columns", (m, n, k), e)
# Blocks that neither N nor K fills.
for m, n, k in ((33, 200, 208), (128, 1008, 336)):
    x, w = torch.randn(m, k, device="cuda", dtype=bf), torch.randn(n, k, device="cuda", dtype=bf)
    a = co.Scaled.quantize(x, "e4m3")
    nb, kb = -(-n // 128), -(-k // 128)
    s = walled(torch.rand(nb, kb, device="cuda") + 0.5)
    full = s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    w8 = (w / full).to(e4)
    args = a, co.Scaled(w8.t(), s)
    co.warm_up(co.gemm, *args)
    r = (a.values.double() * a.scale.double().repeat_interleave(128, 1)[:, :k]) @ (w8.double() * full.double()).t()
    e = rel(co.gemm(*args), r)
    say(e < 5e-3, "sglang#8648 blocks", (m, n, k), e)
# Zeros, and what is tiny, infinite and NaN: the CPU's bits.
x = torch.randn(64, 256, dtype=bf)
x[3] = 0
x[5, :128] = 0
x[7] = 1e-38
x[9, 200] = float("inf")
x[11, 3] = float("nan")
x[13] = 3e38
for block in (None, 128):
    kw = {"block": None} if block is None else {}
    c, g = co.Scaled.quantize(x, "e4m3", **kw), co.Scaled.quantize(x.cuda(), "e4m3", **kw)
    nan = torch.isnan(c.values.float())
    same = torch.equal(c.values.view(torch.uint8)[~nan], g.values.cpu().view(torch.uint8)[~nan]) and torch.equal(
        nan, torch.isnan(g.values.cpu().float())
    )
    say(same and torch.equal(c.scale.nan_to_num(-1), g.scale.cpu().nan_to_num(-1)), "ao#4713 quantize", block)


# Results in FP8 saturate, in a compiled function too.
@co.epilogue
def times(acc, s: co.Scalar):
    return acc * s


x, w = (torch.randn(64, 256, device="cuda", dtype=bf) * 100 for _ in range(2))


def f(x, w, s):
    return co.gemm(x, w.t(), epilogue=times, s=s, out_dtype=e4)


s = torch.tensor(3.0, device="cuda")
co.warm_up(f, x, w, s)
d = f(x, w, s)
c = torch.compile(f, fullgraph=True)(x, w, s)
say(
    d.float().abs().max() == 448
    and not d.float().isnan().any()
    and torch.equal(d.view(torch.uint8), c.view(torch.uint8)),
    "ao#1912 saturation",
)
for s in (torch.tensor([3.0], device="cuda"), torch.tensor([[3.0]], device="cuda"), 3.0, torch.tensor(3.0)):
    say(
        torch.equal(f(x, w, s).view(torch.uint8), d.view(torch.uint8)),
        "vllm#41293 scale",
        tuple(getattr(s, "shape", ())),
    )
# No tokens.
e = co.Scaled.quantize(torch.empty(0, 256, device="cuda", dtype=bf), "e4m3", block=None)
b = torch.randn(48, 256, device="cuda").to(e4)
say(tuple(co.gemm(co.Scaled(e.values, e.scale), co.Scaled(b.t(), 1.0)).shape) == (0, 48), "ao#1352 no rows")
state = co.nn.Fp8State(device="cuda")
state.record(torch.tensor([3.0], device="cuda"))
state.step()
before = state.scale.clone()
state.record(torch.empty(0, device="cuda"))
state.step()
say(torch.equal(state.scale, before), "ao#1352 amax of no rows")
