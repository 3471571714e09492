"""Public reports of offsets beyond 2^31 elements: in A, in D and in a tensor that is quantised. It takes 20 GiB."""

import torch

import cutlass_ops as co

bf = torch.bfloat16
torch.manual_seed(0)


def say(ok, *what):
    print("PASS" if ok else "FAIL", *what, flush=True)


def rel(d, r):
    return ((d.double() - r).norm() / r.norm()).item()


m, k, n = 180_000, 12_288, 64  # 2.2e9 elements of A
a = torch.empty(m, k, device="cuda", dtype=bf)
a.normal_()
w = torch.randn(n, k, device="cuda", dtype=bf)
co.warm_up(co.gemm, a, w.t())
d = co.gemm(a, w.t())
for at in (0, 174_000, 175_000, m - 256):
    say(rel(d[at : at + 256], a[at : at + 256].double() @ w.double().t()) < 5e-3, "A of 2.2e9 elements, row", at)
q = co.Scaled.quantize(a, "e4m3")
for at in (0, 174_700, m - 256):
    r = co.Scaled.quantize(a[at : at + 256].clone(), "e4m3")
    say(
        torch.equal(q.values[at : at + 256].view(torch.uint8), r.values.view(torch.uint8))
        and torch.equal(q.scale[at : at + 256], r.scale),
        "quantize, row",
        at,
    )
del q, d
a = a[:, :64].contiguous()
torch.cuda.empty_cache()
w = torch.randn(k, 64, device="cuda", dtype=bf)  # now D has 2.2e9 elements
co.warm_up(co.gemm, a, w.t())
d = co.gemm(a, w.t())
for at in (0, 174_000, 175_000, m - 256):
    say(rel(d[at : at + 256], a[at : at + 256].double() @ w.double().t()) < 5e-3, "D of 2.2e9 elements, row", at)
