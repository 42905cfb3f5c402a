"""Which effects are too small to be told from rounding at this size and precision.

A fault moves the output by g (FP64, its formula alone), where rounding alone gives an error of variance σ². With

    r_i = Σ_c g²/Σ_c σ²        of row i         f_i = √Σ_c g²/σ²,  ω_i = min(f_i, Q75 of f)

it is above the limit when one of these holds, for the thresholds of `harness.significance` (α = 1e-6 a judgement):

    size       √(mean of r over the tensor, a head, 32 rows or a row) > that level's limit, or |g|/σ of an element > its
    bias       T* = Σω f/√Σω²(f² + 2) > τ + 3, and (1 − (τ + 3)/T*)·rms(g) > what honest kernels show
    scatter    the same for the noise of a fault that is noise, along the directions the judge looks in

T* is the statistic of a test that knows g and compares with a twin: kernel and twin bring one unit of variance each,
and 3 is three of T's own standard deviations. No test at this α sees less in the mean; whether ours looks along g is
another matter, and `own` says what its directions see of g: above the limit and own below τ is a blind spot.

Noise has no g to know beforehand: what is asked is whether it adds to the errors. That is less than its own size where
it makes up for what the recipe does (a sum over the rounded P): with e the error of the honest run, r is the smaller of
Σg² and Σ(e + g)² − Σe², over Σσ². Along a direction T_d = Σh/√Σh², h = |a_kernel| − |a_twin|, is the smaller of two as
well: that of independent noise of variance s² = a_g², for which E|a| = √(2/π)·√(1 + s²), and that of a_e + a_g and a_e.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from harness.directions import key_powers, project
from harness.formats import get_format
from harness.rounding import ulp
from harness.significance import CLIP_SPREAD, FEW_ROWS, SPREAD_RATIO, TWIN_LIMIT, ratio_limit, threshold
from harness.verdict import Bench
from harness.yardstick import BLOCK_ROWS

SIGMAS = 3.0
HALF_NORMAL = 2 / math.pi


@dataclass(frozen=True)
class Limit:
    """`relative`: rms(g)/rms(o). `size`: the largest share of a yardstick's limit. `bias`, `scatter`, `own`: expected
    statistics, of which `own` is along the judge's directions, each as a share of what it has to exceed. `rows`: by
    how much more rows a bias that is below the limit would be above it."""

    relative: float
    size: float
    bias: float
    scatter: float
    own: float
    above: bool
    rows: float

    def as_json(self) -> dict[str, Any]:
        return {k: v if isinstance(v, bool) else float(f"{v:.4g}") for k, v in asdict(self).items()}


def limit(bench: Bench, g: Tensor, honest: Tensor | None = None) -> Limit:
    """Of an effect g `[B, H, L, E]` on the call of `bench`; of one that is noise, `honest` is the output without it."""
    finite, random = torch.isfinite(g) & torch.isfinite(bench.call.truth.out), honest is not None
    g = torch.where(finite, g.double(), 0.0)
    e = (
        torch.zeros_like(g)
        if honest is None
        else torch.where(finite, honest.double() - bench.call.truth.out, 0.0)
    )
    relative = float(g.square().mean().sqrt()) / bench.size
    size = _size(bench, g, e)
    names, a, f, key = _projected(bench, g)
    noise = _projected(bench, e)[1] if random else a
    tau = threshold(2 * len(names) + bench.call.shape.S)
    needed = (TWIN_LIMIT if int(bench.usable.sum()) < FEW_ROWS else tau) + SIGMAS
    t = _bias(*(2 * [_weighted(bench, g)]))
    floor = bench.limits.mean
    # What the judge holds against the floor is (θ̂ − τ·se)·rms(g), where θ̂ is 1 ± se and se = 1/T*.
    bias = t / needed if t < needed or relative * (1 - needed / t) > floor else 0.0
    own = max([_bias(a[i], f[i]) for i in range(len(names))] + [key])
    scatter = max((_scatter(a[i], noise[i]) for i in range(len(names)) if random), default=0.0) / (
        tau + SIGMAS
    )
    seen = max(size, scatter, own / needed) if random else max(size, bias)
    rows = (needed / t) ** 2 if 0 < t < needed and relative > floor and not random else math.inf
    return Limit(relative, size, bias, scatter, own / needed, seen > 1, rows)


def _size(bench: Bench, g: Tensor, e: Tensor) -> float:
    """The largest share of a yardstick's limit that g alone reaches, or adds to an error e."""
    variance = bench.call.variance
    weigh = (bench.independent.view(g.shape[:3]) & torch.isfinite(variance).all(-1)).double()
    square = torch.minimum(g.square().sum(-1), ((e + g).square() - e.square()).sum(-1)).clamp(min=0.0)
    allowed = torch.where(torch.isfinite(variance), variance, 0.0).sum(-1)
    if bool(((allowed == 0) & (square > 0) & (weigh > 0)).any()):
        return math.inf  # a row without an error to excuse it
    r = torch.where(allowed > 0, square / allowed.clamp(min=1e-300), 0.0) * weigh
    b, h, n = r.shape
    blocks = -(-n // BLOCK_ROWS)
    tests, slack = 1 + b * h * (1 + blocks + n), bench.limits.slack
    pad = blocks * BLOCK_ROWS - n
    padded, counted = (torch.nn.functional.pad(x, (0, pad)).reshape(-1, BLOCK_ROWS) for x in (r, weigh))
    shares = [0.0]
    for x, w in ((r.reshape(1, -1), weigh.reshape(1, -1)), (r.flatten(0, 1), weigh.flatten(0, 1)),
                 (padded, counted), (r.reshape(-1, 1), weigh.reshape(-1, 1))):  # fmt: skip
        rows = w.sum(-1)
        mean = (x.sum(-1) / rows.clamp(min=1)).sqrt()
        for count in rows.unique().tolist():
            top = float(mean[rows == count].max())
            shares.append(top / ratio_limit(int(count), tests, slack) if count else 0.0)
    fmt = get_format(bench.call.recipe.out_format)
    spacing = ulp(bench.call.truth.out, fmt) ** 2 / 12 if fmt.precision < 53 else 0.0
    z = torch.where(variance > 0, torch.minimum(g.abs(), (e + g).abs()) / (variance + spacing).sqrt(), 0.0)
    shares.append(float(z.max()) / (slack * threshold(g.numel()) + SIGMAS))
    return max(shares)


def _weighted(bench: Bench, g: Tensor) -> Tensor:
    """f of g itself, of the rows that count."""
    variance = torch.where(torch.isfinite(bench.counted.variance), bench.counted.variance, 0.0)
    variance = torch.maximum(variance, 1e-3 * variance.mean(-1, keepdim=True))
    f = torch.where(variance > 0, g.square() / variance.clamp(min=1e-300), 0.0).sum(-1).sqrt()
    return f.flatten()[bench.usable]


def _projected(bench: Bench, g: Tensor) -> tuple[tuple[str, ...], list[Tensor], list[Tensor], float]:
    """g along the judge's directions, and the statistic of the key that it is most like the loss of."""
    p = project(bench.counted, [g])
    keep = [bench.usable & (f > 0) for f in p.f]
    a, f = [x[k] for x, k in zip(p.a[0], keep, strict=True)], [x[k] for x, k in zip(p.f, keep, strict=True)]
    power, _ = key_powers(bench.counted)
    t = p.key_sum[0].abs() / (p.key_square[0] + 2 * power).clamp(min=1e-300).sqrt()
    return p.names, a, f, float(t.max()) if t.numel() else 0.0


def _bias(a: Tensor, f: Tensor) -> float:
    """Expected |T| of a shift a along a direction of strength f, both `[rows]`."""
    if not f.numel() or not bool((f > 0).any()):
        return 0.0
    omega = torch.minimum(f, torch.quantile(f, 0.75))
    noise = 2 * omega.square().sum() + (0.0 if f.numel() < FEW_ROWS else (omega * a).square().sum())
    return float((omega * a).sum().abs() / noise.sqrt().clamp(min=1e-300))


def _scatter(a: Tensor, e: Tensor) -> float:
    """Expected T_d of noise a along a direction beside errors e, 0 where it is too little to be told."""
    before, after = e.square().mean() if e.numel() else 0.0, (e + a).square().mean() if e.numel() else 0.0
    if a.numel() < FEW_ROWS or float(min(1 + a.square().mean(), after / max(before, 1e-300))) <= SPREAD_RATIO:
        return 0.0
    wide = (1 + a.square()).sqrt().clamp(max=CLIP_SPREAD)
    h = math.sqrt(HALF_NORMAL) * (wide - 1)
    apart = float(h.sum() / (wide.square() + 1 - 2 * HALF_NORMAL * wide).sum().clamp(min=1e-300).sqrt())
    cap = CLIP_SPREAD * torch.maximum((e + a).abs().median(), e.abs().median())
    h = (e + a).abs().clamp(max=cap) - e.abs().clamp(max=cap)
    return min(apart, float(h.sum() / h.norm().clamp(min=1e-300)))
