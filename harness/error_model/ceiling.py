"""The error no correct implementation exceeds, element by element (NUMERICS section 4).

Write the computed output as N̂ / D̂ with N̂ = Σ p_j v_j (1 + a_j) + e and D̂ = 1 + δ. With |a_j| ≤ α_j + ρ, |e| ≤ e*,
|δ| ≤ Δ:  |ô − o| ≤ (Σ p_j (α_j + ρ)|v_j| + e* + Δ|o|) / (1 − Δ), and one rounding of ô.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.error_model.block import Block
from harness.error_model.form import Form, rounded, roundoff, spacing
from harness.error_model.problem import NEGLIGIBLE
from harness.error_model.variance import Spread
from harness.finite import all_finite
from harness.formats import get_format
from harness.recipe import Recipe

SLACK = 1.001  # the bound itself is computed in FP32


def ceiling(b: Block, recipe: Recipe, form: Form) -> Spread:
    """Bounds on |Δout| and |Δlse| of a block; infinite where nothing is promised."""
    base = get_format(recipe.base)
    u, d = base.unit_roundoff, max(b.q.shape[-1], 1)
    span = b.span.stop - b.span.start
    _, blocks = form.groups(span)
    n = b.keys_seen
    steps = 0 if form.arrangement == "whole" else blocks
    # Shift, exp and the factors of later rescales; the shifts of a key add up to |s − m|.
    u_shift = u + roundoff(recipe, "shifted")
    slight = form.subtract_max and b.slight(recipe, u)
    if slight:  # |s| and |s − m| / 2 are within the bound of a row
        eps, flat = b.length_bound * ((d + 8) * u + 2 * u_shift), 0.0
    else:
        eps, flat = _scores(b, recipe, u, d)
        if form.subtract_max:
            eps = eps - u_shift * b.d
    const: Tensor = (
        torch.zeros_like(b.m)
        + flat
        + u_shift * flat
        + 2 * u
        + roundoff(recipe, "exp")
        + steps * (2 * u + roundoff(recipe, "rescale"))
    )
    if form.arrangement == "split":
        biggest = (b.d + b.m).abs().amax(-1, keepdim=True) if b.d.shape[-1] else b.m.abs()
        size = biggest + torch.log(b.count + 1).to(b.m.dtype) + b.m.abs()
        const = const + 2 * u * (size + 2) + roundoff(recipe, "shifted") * 2 * size
    alpha = (eps + const).mul_(SLACK)
    largest = alpha.amax(-1, keepdim=True) if alpha.shape[-1] else torch.zeros_like(b.m)
    if alpha.numel() and float(largest.amax()) < 0.5:
        alpha.addcmul_(alpha, alpha, value=0.6)  # ≥ e^α − 1 for α ≤ 0.5
    else:
        alpha = torch.expm1(alpha.clamp_(max=60.0))
    a = (alpha if slight else (b.p * alpha).sum(-1, keepdim=True)).double()
    if b.sink is not None:
        sunk = torch.expm1(u_shift * b.sink.abs() + u * (b.sink + b.m).abs() + const)
        a = a + torch.where(b.sink_e > 0, sunk * b.sink_e / b.l, 0.0).double()
    sums = (2 * n + 4 * steps + 8) * u
    acc, row_sum = roundoff(recipe, "acc"), roundoff(recipe, "row_sum")
    rho = (
        sums + roundoff(recipe, "probs") + (2 * steps + 1) * acc + (steps > 0) * roundoff(recipe, "block_out")
    )
    least = _least(b, recipe, form, steps)
    rest = sums + (2 * steps + 2) * row_sum + least[2]  # of the denominator, whatever the scores
    after = roundoff(recipe, "probs") if recipe.row_sum == "after" else 0.0
    if recipe.row_sum == "after":
        rest = rest + after + least[1]
    delta = a + rest + after * a
    # Keys taken for weightless: d·(1 − what its own error takes off), at most e^(0.95·NEGLIGIBLE).
    faint = torch.exp((0.95 * NEGLIGIBLE + largest).clamp(max=60.0)).double()
    delta = delta + n * faint
    if slight:
        error = b.mean_abs * (alpha.double() + rho * (1 + a))
    else:
        weighed = alpha.add_((rho * (1 + a)).to(alpha.dtype)).mul_(b.p)
        error = (weighed @ b.heads.abs_v[:, b.keys]).double()
    error.add_(least[0]).addcmul_(faint, b.gross[0])
    if recipe.accumulator is not None:
        # Of what is really added up, quantised weights and all. A kernel may add its blocks in one sum, rescaled in
        # place, so that a block's keys are no bound.
        error = error + recipe.accumulator.loss(span) * (b.mean_abs + error)
    # Where the denominator may vanish, nothing is promised.
    error.addcmul_(delta, b.abs_o).mul_(torch.where(delta < 0.999, SLACK / (1 - delta), math.inf))
    alone = (b.count == 1) & (b.sink_e == 0) & form.subtract_max
    if bool(alone.any()):  # one key's value, whatever happens to its score: exp(s − s) is 1
        lost = 0.0 if recipe.accumulator is None else recipe.accumulator.loss(span)
        own = ((rho + rest + lost) * b.abs_o + least[0]) / (1 - rest) * SLACK
        error = torch.where(alone & (rest < 0.999), torch.minimum(own, error), error)
    out = rounded(recipe, "out")
    if out is not None:
        error.mul_(1 + out.unit_roundoff).add_(b.abs_o, alpha=out.unit_roundoff).add_(out.min_subnormal / 2)
    log = (b.lse - b.m).abs()
    lse = delta + torch.where(delta < 0.5, delta**2, math.inf) + 4 * u * (b.lse.abs() + log + b.m.abs())
    leaves = b.leaves(recipe)
    if not form.subtract_max:
        leaves = leaves | _unheld(b, recipe)
    lse = lse.double()
    error, lse = (x if all_finite(x) else x.nan_to_num_(math.inf, math.inf) for x in (error, lse))
    if bool(leaves.any()):
        error, lse = (x.masked_fill_(leaves, math.inf) for x in (error, lse))
    return Spread(error, lse)


def _scores(b: Block, recipe: Recipe, u: float, d: int) -> tuple[Tensor, float]:
    """Bounds on |Δs_j|: a part by key, and a constant."""
    raw, stored = roundoff(recipe, "scores_raw"), roundoff(recipe, "scores")
    fine = rounded(recipe, "out") is None
    lost = 0.0 if recipe.accumulator is None else recipe.accumulator.loss(d)
    eps = (b.absolute if fine else b.length_bound) * ((d + 2) * u + lost)
    # Products with scale and the scales of q and k: 5u. |lin| ≤ |d| + |m| where it is their sum.
    share = raw + stored + raw * stored + 6 * u
    eps = eps + share * b.m.abs() - share * b.d if b.plain else eps + share * b.lin.abs()
    flat = spacing(recipe, "scores_raw") * abs(b.scale) / 2 + spacing(recipe, "scores") / 2
    if b.p_.spec.softcap is not None:
        eps = eps + (stored + u) * b.lin.abs()
        eps = eps + (2 * stored + 6 * u) * b.capped.abs()
        flat += spacing(recipe, "scores") * (1 + b.p_.spec.softcap)
    if b.bias is not None:
        eps = eps + (stored + 2 * u) * (b.d + b.m).abs() + (u + stored) * b.bias.abs()
        flat += spacing(recipe, "scores") / 2
    return eps, flat


def _least(b: Block, recipe: Recipe, form: Form, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """What subnormal spacings add: to the sum, to a denominator of quantised P, to any denominator."""
    base = get_format(recipe.base)
    l = b.wide_l  # noqa: E741
    if not form.subtract_max:
        l = l * torch.exp(b.wide_m)  # noqa: E741
    every = spacing(recipe, "exp") / 2 + steps * spacing(recipe, "rescale") / 2
    cast = spacing(recipe, "probs") / (2 * recipe.p_scale)
    n = b.keys_seen
    tiny = base.min_normal * (1 + n) * max(1, steps)
    counted = cast + every > 1e-30
    gross = b.alive_gross if counted else b.gross[0]
    weight = (cast + every + tiny) / l
    held = (2 * steps + 1) * spacing(recipe, "acc") / 2 + (steps > 0) * spacing(recipe, "block_out") / 2
    # A sum that is divided first, in a row or in each of its parts, is held at the output's own size.
    first = form.normalises_early(recipe) or form.arrangement == "split"
    out = (weight * gross).add_(held / recipe.p_scale / (1.0 if first else l))
    # V itself may be subnormal: each product and sum is on the base's spacing, and the quotient with its factors.
    scale = b.heads.scale("v")
    factor = max(1.0, 1 / recipe.p_scale, 1.0 if scale is None else float(scale.max()))
    sums = (n + steps) / (1.0 if recipe.normalise == "early" else l) + 2
    out.addcmul_(b.any_v, base.min_subnormal * factor * sums)
    rows = (2 * steps + 2) * spacing(recipe, "row_sum") / 2 / l
    return out, n * cast / l, n * (every + tiny) / l + rows


def _unheld(b: Block, recipe: Recipe) -> Tensor:
    """Rows whose exp(s) itself, its sum, or its sum times V's codes may leave a format, or the row its mass."""
    scale = b.heads.scale("v")
    codes = b.heads.abs_v if scale is None else b.heads.abs_v / scale.to(b.heads.abs_v.dtype)
    most = float(codes.amax()) if codes.numel() else 1.0
    peak = b.wide_m + b.wide_l.log() + math.log(max(1.0, recipe.p_scale) * max(1.0, most))
    tops = (get_format(recipe.format_of(s)).max for s in ("exp", "probs", "row_sum", "acc"))
    return (peak > min(math.log(x) for x in tops) - 0.1) | (b.m < -80)
