"""The table of planted faults, by entry of `cases/field.py`, and the kernels that have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from field_faults import Planted
from planted import Kernel, Made, cast, visible
from torch import Tensor

import harness
from harness.arithmetic import DTYPES
from harness.attention.paged import PagedCache
from harness.attention.session import Session
from harness.inputs import rotate_at
from harness.options import alibi_slopes
from harness.recipe import get_recipe

Output = Callable[[Made], Any]


def kernel(**switches: Any) -> Output:
    return Kernel(**switches)


def under(recipe: str, **at: str) -> Output:
    """An algorithm under this recipe with other formats at some stages."""
    wrong = get_recipe(recipe)
    wrong = replace(wrong, name=f"{recipe}+", at={**wrong.at, **at}) if at else wrong
    return lambda call: wrong


def after(change: Callable[[Tensor, Made], Tensor], **switches: Any) -> Output:
    """Something done to an honest kernel's output."""
    return lambda call: cast(change(Kernel(**switches)(call), call), call.recipe.out_format)


def given(change: Callable[[Made], Made], **switches: Any) -> Output:
    """An honest kernel on another call than was asked for."""
    return lambda call: Kernel(**switches)(change(call))


def extras(**changes: Callable[[Tensor], Tensor]) -> Output:
    """An honest kernel that is passed other extras."""
    return given(lambda c: replace(c, extras={**c.extras, **{n: f(c.extras[n]) for n, f in changes.items()}}))


# --- visible keys ------------------------------------------------------------------------------------------------


def _beside(by: int) -> Callable[[Tensor], Tensor]:
    """The left edge one key farther out (1), or the right one farther in (−1)."""

    def moved(seen: Tensor) -> Tensor:
        other = torch.zeros_like(seen)
        other[..., :-1] = seen[..., 1:]
        return seen | other if by > 0 else seen & other

    return moved


def _first_keys(seen: Tensor) -> Tensor:
    """Causality aligned top-left."""
    return torch.ones_like(seen).tril()


def _past(seen: Tensor) -> Tensor:
    """Causality over the whole row, and nothing else."""
    return torch.ones_like(seen).tril(seen.shape[-1] - seen.shape[-2])


def _full_tail(seen: Tensor) -> Tensor:
    """The last block of the mask taken for one without a hidden key."""
    seen = seen.clone()
    seen[..., 128:, 128:] = True
    return seen


def _beyond_head_0(seen: Tensor) -> Tensor:
    """A mask of one head indexed by all of them: what lies behind it is no mask."""
    seen = seen.clone()
    seen[:, 1:] = True
    return seen


# --- K, V and their scales ---------------------------------------------------------------------------------------


def _cut_at(width: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x[..., :width], torch.zeros_like(x[..., width:])], -1)


def _wrapped(x: Tensor) -> Tensor:
    """Row j is row j mod 2^16."""
    return torch.cat([x[:, :, : 2**16], x[:, :, : x.shape[2] - 2**16]], 2)


def _padded(call: Made) -> Made:
    """Keys and values of zero up to a whole block of 64, and no mask."""
    q, k, v = call.exact
    n = -k.shape[2] % 64
    return replace(call, exact=(q, *(torch.nn.functional.pad(x, (0, 0, 0, n)) for x in (k, v))))


def _one(scale: Tensor, name: str) -> Tensor:
    return torch.ones_like(scale) if name == "k" else scale


def _of_head_0(scale: Tensor, name: str) -> Tensor:
    return scale[:, :1].expand_as(scale) if name == "k" else scale


def _zero_by_zero(scale: Tensor, name: str) -> Tensor:
    """A scale of amax / max where amax is 0: codes 0/0, times 0."""
    return torch.where(scale == 1, math.nan, scale) if name == "v" else scale


def _unscaled(call: Made) -> Made:
    return replace(call, recipe=get_recipe("fp8_e4m3_unscaled"))


def _nan_past_464(call: Made) -> Tensor:
    lost = call.exact[2].abs() > 464
    return Kernel(v=lambda v: v.masked_fill(lost, math.nan))(call)


def _turned(call: Made) -> Made:
    """RoPE at positions rounded to BF16."""
    q, k, v = call.exact
    start = 15962.0
    at = torch.arange(k.shape[2], dtype=torch.float64) + start
    by = at.bfloat16().double() - at
    return replace(call, exact=(rotate_at(q, by[-q.shape[2] :]), rotate_at(k, by), v))


# --- bias and sinks ----------------------------------------------------------------------------------------------


def _geometric(bias: Tensor) -> Tensor:
    """ALiBi with slopes 2^(−8h/H), whatever the number of heads."""
    heads = bias.shape[1]
    wrong = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return bias / alibi_slopes(heads).view(1, -1, 1, 1) * wrong.view(1, -1, 1, 1)


# --- caches, splits and blocks -----------------------------------------------------------------------------------


def paged(size: int, spoil: Callable[[PagedCache], None]) -> Output:
    """A session over pages of `size` tokens, spoilt between the tokens and the query."""

    def output(call: Made) -> Tensor:
        q, k, v = (x.codes for x in call.stored)
        shape = harness.Shape(*q.shape, kv_heads=k.shape[1], kv_len=k.shape[2], value_dim=v.shape[3])
        dtypes = (DTYPES[call.recipe.storage[n]] for n in "kv")
        cache = PagedCache(q.shape[0], *k.shape[1:], v.shape[3], *dtypes, block_size=size, seed=0)
        session = Session(shape, call.spec, call.recipe, cache=cache)
        session.append(k, v)
        spoil(cache)
        return session.attend(q)[0]

    return output


def _one_more(cache: PagedCache) -> None:
    """The first unwritten slot of the last page is taken for a token; the query stands where it stood."""
    cache.length += 1


def _stale(cache: PagedCache) -> None:
    cache.table[:, -1] = cache.table[:, -2]


def _swapped(cache: PagedCache) -> None:
    cache.table[:, [-2, -1]] = cache.table[:, [-1, -2]]


def split(fault: str, size: int = 16) -> Output:
    """Parts of the keys apart, merged by their lse with a mistake about parts that see nothing."""

    def output(call: Made) -> Tensor:
        q, k, v = (x.values.float() for x in call.stored)
        s = (q @ k.mT * call.spec.scale_for(q.shape[3])).masked_fill(~visible(call), -math.inf)
        outs, logs = [], []
        for keys in s.split(size, -1):
            m = keys.amax(-1, keepdim=True)
            e = torch.exp(keys - m.masked_fill(m == -math.inf, 0.0))
            l, at = e.sum(-1, keepdim=True), len(outs) * size  # noqa: E741
            outs.append(e @ v[:, :, at : at + size] / torch.where(l == 0, 1.0, l))
            empty = 0.0 if fault == "finite lse" else -math.inf
            logs.append((m + l.log()).masked_fill(m == -math.inf, empty))
        o, log = torch.stack(outs), torch.stack(logs)
        w = torch.exp(log - log.amax(0))  # −∞ − (−∞) is NaN
        o = (w * o).sum(0) / w.sum(0)
        return cast(o if fault == "−∞ − (−∞)" else o.nan_to_num(0.0), call.recipe.out_format)

    return output


def pair(one: Kernel, other: Kernel, rows: slice = slice(None)) -> Output:
    """Two runs of what should be one thing: the whole call, and these rows alone."""

    def output(call: Made) -> tuple[Tensor, Tensor]:
        q, k, v = call.exact
        return one(call)[:, :, rows], other(replace(call, exact=(q[:, :, rows], k, v)))

    return output


def by_table(call: Made) -> tuple[Tensor, Tensor]:
    """Causality by the rule, and by a table that says the same."""
    table = replace(call, spec=replace(call.spec, causal=False), extras={"mask": visible(call)})
    return Kernel()(call), Kernel()(table)


_STUCK = (
    "the suspects' accumulators take blocks of 16 keys and more, where a sum of ones does not stand still"
)
PLANTS = (
    Planted("f01-empty-row", "the empty row is NaN", kernel(empty=math.nan), ("empty rows",)),
    Planted("f02-band", "a running max of −∞ is subtracted from −∞", kernel(guarded=False)),
    Planted("f03-nan-in-hidden-slots", "hidden P = 0 times NaN", kernel()),
    Planted("f05-left-padding", "rows of padding are NaN", kernel(empty=math.nan), ("empty rows",)),
    Planted("f06-triangle", "True hides", kernel(seen=torch.logical_not), ("mask inverted",)),
    Planted("f07-mask-HS", "all heads read the mask of head 0", kernel(seen=lambda s: s[:, :1].expand_as(s)),
            ("mask of head 0",)),
    Planted("f07-mask-LS", "heads read past a mask of one head", kernel(seen=_beyond_head_0)),
    Planted("f07-bias-HS", "all heads read the bias of head 0", extras(bias=lambda b: b[:, :1]), ("bias of head 0",)),
    Planted("f08-finite-bias", "the bias is scaled with the scores", kernel(bias=lambda b: b / 8), ("bias scaled",)),
    Planted("f11-bottom-right", "aligned top-left", kernel(seen=_first_keys), ("alignment",)),
    Planted("f11-decode", "the decode step sees key 0 alone", kernel(seen=_first_keys), ("alignment",)),
    Planted("f11-top-left", "aligned bottom-right", kernel(seen=_past), ("alignment",)),
    Planted("f12-more-queries", "rows before the first key are NaN", kernel(empty=math.nan), ("empty rows",)),
    Planted("f12-more-queries", "aligned top-left", kernel(seen=_first_keys), ("alignment",)),
    Planted("f15-window-4", "a window of w keys holds w + 1", kernel(seen=_beside(1)), ("left + 1",)),
    Planted("f16-window-4", "the window never arrives", kernel(seen=_past), ("no window",)),
    Planted("f16-window-own", "a side of 0 is taken for none", kernel(seen=_past), ("no window",)),
    Planted("f17-packed-3+5", "tokens see across the border", kernel(seen=_past)),
    Planted("f18-raw-131072", "q·k is stored in FP16", under("fp16_eager"), ("overflow in scores_raw",)),
    Planted("f19-no-scale", "q·k is stored in FP16, the softmax is FP32", under("fp16", scores_raw="fp16"),
            ("overflow in scores_raw",)),
    Planted("f20-v-60000-amp-1", "O is accumulated in FP16", under("fp16", acc="fp16"), ("overflow in acc",)),
    Planted("f21-helper-key", "K is cached in FP16 under a BF16 recipe", kernel(k=lambda k: k.half().float())),
    Planted("f21-helper-key", "the recipe's cache is FP16", kernel(), ("overflow in k",), "fp16", "precision"),
    Planted("f22-133120", "q·k is stored in FP16", under("bf16", scores_raw="fp16"), ("overflow in scores_raw",)),
    Planted("f22-one-key", "q·k is stored in FP16", under("bf16", scores_raw="fp16"), ("overflow in scores_raw",)),
    Planted("f23-low-logits", "the max starts at 0", kernel(start=0.0)),
    Planted("f23-low-logits", "the max starts at −1e4, 0/0 becomes 0", after(lambda o, c: o.nan_to_num(0.0),
            start=-1e4),
            ("all zeros",)),
    Planted("f24-n512", "every stage is BF16", under("bf16_eager")),
    Planted("f24-n512", "q·k is kept in BF16", under("bf16", scores_raw="bf16"), ("bf16 q·k",)),
    Planted("f25-same-dtype", "an FP16 chain is offered for a kernel", under("fp16_eager")),
    Planted("f25-same-dtype", "q·k is kept in FP16", under("fp16", scores_raw="fp16"), ("fp16 q·k",)),
    Planted("f27-fp16-2049", "O is accumulated in FP16, key by key", kernel(block=1, acc=torch.float16),
            ("fp16 accumulator",), misnamed=_STUCK),
    Planted("f27-bf16-257", "O is accumulated in BF16, key by key", kernel(block=1, acc=torch.bfloat16),
            ("bf16 accumulator",), misnamed=_STUCK),
    *(
        Planted(f"f28-{fmt}-tiny", "subnormals are flushed",
                after(lambda o, c, least=least: torch.where(o.abs() < least, 0.0, o)), ("all zeros",))
        for fmt, least in (("fp32", 2.0**-126), ("bf16", 2.0**-126), ("fp16", 2.0**-14))
    ),
    Planted("f29-position-15962", "RoPE takes positions in BF16", given(_turned)),
    Planted("f30-table", "the last block of the mask is taken for full", kernel(seen=_full_tail)),
    Planted("f30-formula", "formula and table differ in the last block",
            lambda c: (Kernel()(c), Kernel(seen=_full_tail)(c)), instrument="relation", right=by_table),
    *(
        Planted(f"f31-gqa-{h}-{g}", "kv heads are tiled", kernel(kv_index=lambda i, n: torch.arange(len(i)) % n),
                ("GQA interleaved",))
        for h, g in ((4, 2), (28, 4))
    ),
    Planted("f32-d40", "the scale comes from 64", kernel(scale=math.sqrt(40 / 64)), ("scale",)),
    Planted("f32-d40-in-64", "the scale comes from the padded width", kernel(scale=math.sqrt(40 / 64)), ("scale",)),
    Planted("f33-e24", "the scale comes from V's width", kernel(scale=math.sqrt(32 / 24)), ("scale",)),
    Planted("f33-e64", "the scale comes from V's width", kernel(scale=math.sqrt(32 / 64)), ("scale",)),
    Planted("f33-e64", "columns beyond 32 are not written", after(lambda o, c: _cut_at(32)(o))),
    *(
        Planted(f"f34-d{d}", f"{n} columns of q and k are read", kernel(k=_cut_at(n)), ("head_dim cut",))
        for d, n in ((63, 32), (72, 64), (96, 64), (128, 64))
    ),
    Planted("f35-n137", "the tail is lost", kernel(seen=lambda s: torch.cat([s[..., :128], ~s[..., 128:]], -1)),
            ("tail of 64 lost", "last block of 16 lost")),
    Planted("f35-n12", "the tail is filled with zeros and not masked", given(_padded),
            ("padding to 16 in the sum", "padding to 64 in the sum", "shrink")),
    Planted("f35-n9", "the tail is filled with zeros and not masked", given(_padded),
            ("padding to 16 in the sum", "padding to 64 in the sum", "shrink")),
    Planted("f37-no-width", "an early return gives zeros", after(lambda o, c: torch.zeros_like(o)), ("all zeros",)),
    Planted("f41-last-keys", "key j is read at j mod 65536", kernel(k=_wrapped, v=_wrapped), precise=False),
    Planted("f43-empty-splits", "−∞ − (−∞) where all parts are empty", split("−∞ − (−∞)"), ("empty rows",)),
    Planted("f43-empty-splits", "an empty part has a finite lse", split("finite lse"), ("shrink",)),
    Planted("f45-sink", "the sink is dropped", kernel(sinks=False), ("no sink",)),
    Planted("f45-sink", "the sink counts in each of two splits", extras(sinks=lambda s: s + math.log(2)),
            ("sink twice",)),
    *(
        Planted(f"f46-alibi-{h}", "slopes are one geometric series", extras(bias=_geometric))
        for h in (6, 12, 40)
    ),
    Planted("f46-alibi-12", "exponents are off by one", extras(bias=lambda b: 2 * b), ("bias twice",)),
    Planted("f47-pages-of-4", "an unwritten slot is read", paged(4, _one_more)),
    Planted("f47-pages-of-4", "the last two pages are swapped", paged(4, _swapped)),
    Planted("f47-pages-of-16", "the last table entry is stale", paged(16, _stale), ("stale block of 16",)),
    Planted("f48-last-rows", "a step attends before its own token is there", kernel(seen=_beside(-1)),
            ("right − 1", "last key")),
    Planted("f49-hot-key-n139", "P is rounded in blocks of 96, and of 128", pair(Kernel(block=96), Kernel(block=128)),
            instrument="relation", right=pair(Kernel(block=96, two_passes=True), Kernel(block=128, two_passes=True))),
    Planted("f50-batch", "the block depends on the number of rows", pair(Kernel(block=64), Kernel(block=16),
            slice(-1, None)),
            instrument="relation", right=pair(Kernel(block=64), Kernel(block=64), slice(-1, None))),
    Planted("f51-past-464", "what is past 464 becomes NaN", _nan_past_464, ("saturation in v",)),
    Planted("f51-past-464", "values past 448 are clamped", kernel(), ("saturation in v",), None, "precision"),
    Planted("f53-zero-head", "a scale of 0: 0/0", kernel(scales=_zero_by_zero)),
    Planted("f54-k-900", "scales are ignored: 1", given(_unscaled)),
    Planted("f54-k-900", "the recipe's scale is 1", kernel(), ("saturation in k",), "fp8_e4m3_unscaled", "precision"),
    Planted("f54-k-tiny", "scales are ignored: 1", given(_unscaled)),
    Planted("f55-head-scales", "K is not descaled", kernel(scales=_one), ("k not descaled",)),
    Planted("f55-head-scales", "the scale of head 0 serves all", kernel(scales=_of_head_0), ("scale of k of head 0",)),
    Planted("f57-stale-max", "P × 4096 clamps at 448", kernel(p_scale=4096.0)),
    Planted("f58-values-30", "O is cut, not rounded", kernel(cut_o=True)),
    Planted("f58-values-30", "the scale is off by 0.1 %", kernel(scale=1.001), ("scale",)),
    Planted("f60-no-nan", "one element is NaN", after(lambda o, c: o.index_fill(3, torch.tensor(3), math.nan))),
    Planted("f60-nan-in-v", "NaN in V is read as 0", kernel(v=lambda v: v.nan_to_num(0.0))),
    Planted("f61-n1024", "the scale is √D", kernel(scale=128.0), ("scale √D",)),
    Planted("f62-heavy-n512", "P is cast without its scale", kernel(p_scale=1.0), ("P scale 1",)),
    Planted("f62-n512", "P is cast without its scale", kernel(p_scale=1.0), ("P scale 1",),
            missed="on these numbers it errs no more than the recipe does"),
    Planted("f63-same-code", "the scale is off by 1 %", kernel(scale=1.01), ("scale",), None, "gate"),
)  # fmt: skip
