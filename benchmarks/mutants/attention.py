"""Honest attention in five arrangements on torch alone: what every mutant is an edit of.

One method is one step of the formulas, so that a mutant is one method replaced. Codes and scales come in as a kernel
takes them; everything runs in FP32 and is rounded where the recipe rounds. `exact` runs the same text in FP64 without
the recipe's roundings (but those of `keeps`): the effect of a mutant is then its formula's alone.

    naive      all keys at once                         triangle   blocks of 64 rows, keys up to the diagonal
    online     blocks of 64 keys under a running max    decode     a prefill, then a row a step, over a paged cache
    split      four parts of the keys, merged by lse
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.calls import Call
from benchmarks.mutants.pages import Pages
from harness.rounding import round_to

ARRANGEMENTS = ("naive", "triangle", "online", "decode", "split")
BLOCK, STEPS, SPLITS = 64, 32, 4
State = tuple[Tensor, Tensor, Tensor]  # m, l and O of some rows


class Attention:
    """One call; `run()` gives out `[B, H, L, E]` and lse `[B, H, L]`."""

    keeps: frozenset[str] = frozenset()  # stages that are rounded even in `exact`

    def __init__(self, call: Call, arrangement: str = "online", exact: bool = False) -> None:
        self.call, self.spec, self.recipe, self.exact = call, call.spec, call.recipe, exact
        self.arrangement = arrangement
        self.dtype = torch.float64 if exact else torch.float32
        self.q, self.k, self.v = (x.codes.to(self.dtype) for x in call.stored)
        self.scales = {
            n: None if x.scale is None else x.scale.to(self.dtype)
            for n, x in zip("qkv", call.stored, strict=True)
        }
        self.extras = {n: x for n, x in call.extras.as_options().items() if x is not None}
        self.rows, self.keys = self.q.shape[2], self.k.shape[2]
        self.prepare()

    def run(self) -> tuple[Tensor, Tensor]:
        out, lse = getattr(self, self.arrangement)()
        return self.deliver(out), lse

    # --- what comes in ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Each query head's own K and V."""
        self.share(self.head_of(self.q.shape[1], self.k.shape[1]))

    def share(self, index: Tensor) -> None:
        self.k, self.v = self.k[:, index], self.v[:, index]
        for n in "kv":
            scale = self.scales[n]
            if scale is not None and scale.shape[1] > 1:
                self.scales[n] = scale[:, index]

    def head_of(self, heads: int, kv_heads: int) -> Tensor:
        return torch.arange(heads) // (heads // kv_heads)

    def descaled(self, name: str) -> Tensor | float:
        scale = self.scales[name]
        return 1.0 if scale is None else scale

    def rounded(self, x: Tensor, stage: str) -> Tensor:
        fmt = self.recipe.format_of(stage)
        if fmt == self.recipe.base or (self.exact and stage not in self.keeps):
            return x
        return round_to(x, fmt, self.recipe.policy(stage))

    # --- scores ----------------------------------------------------------------------------------------------------

    def scale(self) -> float:
        return self.spec.scale_for(self.q.shape[3])

    def raw(self, rows: slice, keys: slice) -> Tensor:
        return self.q[:, :, rows] @ self.k[:, :, keys].mT

    def scores(self, rows: slice, keys: slice) -> Tensor:
        s = self.raw(rows, keys) * (self.scale() * self.descaled("q") * self.descaled("k"))
        s = self.biased(self.capped(s), rows, keys)
        return self.hidden(s, self.seen(rows, keys))

    def capped(self, s: Tensor) -> Tensor:
        cap = self.spec.softcap
        return s if cap is None else cap * torch.tanh(s / cap)

    def bias(self) -> Tensor | None:
        return self.extras.get("bias")

    def biased(self, s: Tensor, rows: slice, keys: slice) -> Tensor:
        bias = self.bias()
        return s if bias is None else s + cut(bias, rows, keys).to(self.dtype)

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        return s.masked_fill(~seen, -math.inf)

    # --- which keys ------------------------------------------------------------------------------------------------

    def lengths(self) -> Tensor:
        lens = self.extras.get("kv_lens")
        return (torch.tensor([self.keys]) if lens is None else lens).view(-1, 1, 1, 1)

    def position(self, rows: slice) -> Tensor:
        i = torch.arange(rows.start, rows.stop).view(1, 1, -1, 1)
        return i + self.shift()

    def shift(self) -> Tensor | int:
        return self.lengths() - self.rows if self.spec.align == "bottom-right" else 0

    def edges(self) -> tuple[int | None, int | None]:
        """How many keys are seen to the left and to the right of the own position."""
        left, right = (None, None) if self.spec.window is None else self.spec.window
        return left, 0 if self.spec.causal else right

    def mask(self) -> Tensor | None:
        return self.extras.get("mask")

    def seen(self, rows: slice, keys: slice) -> Tensor:
        j = torch.arange(keys.start, keys.stop).view(1, 1, 1, -1)
        at, (left, right) = self.position(rows), self.edges()
        seen = (j < self.lengths()).expand(-1, -1, rows.stop - rows.start, -1)
        seen = seen if left is None else seen & (j >= at - left)
        seen = seen if right is None else seen & (j <= at + right)
        mask = self.mask()
        return seen if mask is None else seen & cut(mask, rows, keys)

    # --- softmax and P·V -------------------------------------------------------------------------------------------

    def sink(self) -> Tensor | None:
        """Logits `[1, H, 1, 1]`."""
        sinks = self.extras.get("sinks")
        return None if sinks is None else sinks.to(self.dtype).view(1, -1, 1, 1)

    def start(self, rows: slice) -> State:
        b, h = self.q.shape[:2]
        m = self.q.new_full((b, h, rows.stop - rows.start, 1), -math.inf)
        l, o = torch.zeros_like(m), self.q.new_zeros(*m.shape[:3], self.v.shape[3])
        sink = None if self.arrangement == "split" else self.sink()
        return (m, l, o) if sink is None else (sink.expand_as(m).clone(), torch.ones_like(m), o)

    def top(self, s: Tensor, m: Tensor) -> Tensor:
        return torch.maximum(m, s.amax(-1, keepdim=True))

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def factor(self, old: Tensor, new: Tensor) -> Tensor:
        """What older sums are multiplied by when the max grows."""
        return torch.exp(old - new)

    def p_scale(self) -> float:
        return self.recipe.p_scale

    def probs(self, e: Tensor) -> Tensor:
        return self.rounded(e * self.p_scale(), "probs")

    def summed(self, e: Tensor, p: Tensor) -> Tensor:
        return e.sum(-1, keepdim=True)

    def add_l(self, a: Tensor, l: Tensor, part: Tensor) -> Tensor:
        return a * l + part

    def add_o(self, a: Tensor, o: Tensor, part: Tensor) -> Tensor:
        return a * o + part

    def product(self, p: Tensor, keys: slice) -> Tensor:
        return p @ self.v[:, :, keys]

    def step(self, state: State, rows: slice, keys: slice) -> State:
        """One block of keys."""
        m, l, o = state
        s = self.scores(rows, keys)
        new = self.top(s, m)
        base = new.masked_fill(new == -math.inf, 0.0)
        e, a = self.exp(s - base), self.factor(m, base)
        p = self.probs(e)
        l = self.add_l(a, l, self.summed(e, p))
        return new, l, self.add_o(a, o, self.product(p, keys))

    def stream(self, rows: slice, keys: slice, block: int) -> State:
        state = self.start(rows)
        for start in range(keys.start, keys.stop, block):
            state = self.step(state, rows, slice(start, min(start + block, keys.stop)))
        return state

    def divided(self, state: State) -> tuple[Tensor, Tensor]:
        """O / l with all scales undone, and lse; a row without keys is 0."""
        m, l, o = state
        o = o / self.p_scale() * self.descaled("v")
        return o / torch.where(l == 0, 1.0, l), (m + l.log())[..., 0]

    def finished(self, state: State) -> tuple[Tensor, Tensor]:
        o, lse = self.divided(state)
        return self.rounded(o, "out"), lse

    def deliver(self, out: Tensor) -> Tensor:
        return out

    # --- arrangements ----------------------------------------------------------------------------------------------

    def naive(self) -> tuple[Tensor, Tensor]:
        return self.finished(self.stream(slice(0, self.rows), slice(0, self.keys), self.keys))

    def online(self) -> tuple[Tensor, Tensor]:
        return self.finished(self.stream(slice(0, self.rows), slice(0, self.keys), BLOCK))

    def reach(self, rows: slice) -> int:
        """The end of the keys that some of these rows may see."""
        right = self.edges()[1]
        last = int(self.position(rows).max())
        return self.keys if right is None else max(0, min(self.keys, last + right + 1))

    def triangle(self) -> tuple[Tensor, Tensor]:
        return joined(
            self.finished(self.stream(rows, slice(0, self.reach(rows)), max(1, self.keys)))
            for rows in row_blocks(self.rows, BLOCK)
        )

    def decode(self) -> tuple[Tensor, Tensor]:
        k, v, held, parts = self.k, self.v, 0, []
        cache = self.cache()
        first = max(0, self.rows - STEPS)
        for rows in [slice(0, first)] * (first > 0) + [slice(t, t + 1) for t in range(first, self.rows)]:
            end = self.reach(rows)
            cache.write(held, k[:, :, held:end], v[:, :, held:end])
            held = max(held, end)
            self.k, self.v = cache.read(end)
            parts.append(self.finished(self.stream(rows, slice(0, end), max(1, end))))
        return joined(parts)

    def cache(self) -> Pages:
        return Pages(self.k, self.v)

    def parts(self) -> list[slice]:
        size = -(-self.keys // SPLITS)
        return [slice(i * size, min((i + 1) * size, self.keys)) for i in range(SPLITS)]

    def partial(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        return self.divided(self.stream(rows, keys, max(1, keys.stop - keys.start)))

    def weights(self, lses: Tensor) -> Tensor:
        """Of each part, `[parts, B, H, L]`."""
        top = lses.amax(0)
        return torch.exp(lses - top.masked_fill(top == -math.inf, 0.0))

    def merged_lse(self, lses: Tensor) -> Tensor:
        return torch.logsumexp(lses, 0)

    def split(self) -> tuple[Tensor, Tensor]:
        rows = slice(0, self.rows)
        outs, lses = (list(x) for x in zip(*(self.partial(rows, p) for p in self.parts()), strict=True))
        sink = self.sink()
        if sink is not None:
            outs.append(torch.zeros_like(outs[0]))
            lses.append(sink[..., 0].expand_as(lses[0]))
        o, lse = torch.stack(outs), torch.stack(lses)
        w = self.weights(lse)[..., None]
        total = w.sum(0)
        out = (w * o).sum(0) / torch.where(total == 0, 1.0, total)
        return self.rounded(out, "out"), self.merged_lse(lse)


def cut(x: Tensor, rows: slice, keys: slice) -> Tensor:
    """Rows and keys of a tensor that may have one of either."""
    x = x[:, :, rows] if x.shape[2] > 1 else x
    return x[..., keys] if x.shape[3] > 1 else x


def row_blocks(rows: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def joined(parts: Any) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
