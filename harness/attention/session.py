"""A cache session: tokens arrive in chunks of any size, each chunk attends over what the cache holds.

A chunk of n queries at positions p … p + n − 1 sees keys ≤ its own position (and, with a window, not far before):
    O_chunk = softmax(scale·Q_chunk K_{<p+n}ᵀ + M) V_{<p+n}
which is rows p … p + n − 1 of one-shot causal attention, for any chunking and any kind of cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.arithmetic import DTYPES, Arithmetic, Block, Watcher
from harness.attention.algorithm import Algorithm
from harness.attention.cache import Cache
from harness.attention.kv_cache import KVCache
from harness.attention.naive import attend
from harness.attention.paged import PagedCache
from harness.attention.rows import Problem, key_range
from harness.attention.sliding import SlidingCache
from harness.operands import Extras, slice_rows_keys
from harness.recipe import Recipe, get_recipe
from harness.scaling import E8M0_BYTES, FP32_BYTES, MX_BLOCK
from harness.spec import AttentionSpec, Shape

KINDS = ("contiguous", "paged", "sliding")
Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_SCALES: Scales = (None, None, None)


def make_cache(
    kind: str, shape: Shape, recipe: Recipe, device: torch.device | str = "cpu",
    *, block_size: int = 16, seed: int | None = 0, window: int | None = None,
) -> Cache:  # fmt: skip
    """A cache for `shape.kv_len` tokens (`sliding`: the last `window`) in the recipe's storage dtypes.

    Raises ValueError for an unknown kind.
    """
    widths = (shape.head_dim, shape.E, DTYPES[recipe.storage["k"]], DTYPES[recipe.storage["v"]], device)
    if kind == "contiguous":
        return KVCache(shape.batch, shape.Hkv, shape.S, *widths)
    if kind == "paged":
        return PagedCache(shape.batch, shape.Hkv, shape.S, *widths, block_size=block_size, seed=seed)
    if kind == "sliding":
        return SlidingCache(shape.batch, shape.Hkv, shape.S if window is None else window, *widths)
    raise ValueError(f"cache kind is {kind!r}; allowed: {', '.join(KINDS)}")


@dataclass(frozen=True)
class _Placed:
    """A watcher told of rows and keys of the whole run, where the arithmetic counts those of a chunk."""

    watch: Watcher
    row: int
    key: int

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.watch(stage, before, after, replace(block, row=block.row + self.row, key=block.key + self.key))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        self.watch.stagnation(stage, held, added, after)


@contextmanager
def _placed(ar: Arithmetic, row: int, key: int) -> Iterator[None]:
    watch = ar.watch
    ar.watch = watch if watch is None else _Placed(watch, row, key)
    try:
        yield
    finally:
        ar.watch = watch


class Session:
    """Causal attention over a growing cache.

    `shape` gives batch, heads and widths; its kv_len is the capacity of the cache made when none is given (its q_len
    says nothing). `scales` of q, k, v hold for all tokens (`[B|1, H|1, 1, 1]` or None); scales per token arrive with
    their tokens instead. `sinks` `[H]`. An `Arithmetic` in place of a recipe is used as it is, watcher and all.

    Raises ValueError for a spec that is not causal, and for one whose rows see keys a sliding cache has dropped.
    """

    def __init__(
        self, shape: Shape, spec: AttentionSpec, recipe: str | Recipe | Arithmetic = "fp32", *,
        cache: Cache | None = None, scales: Scales = NO_SCALES, sinks: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if not spec.causal:
            raise ValueError("the spec is not causal; allowed: causal=True, later tokens do not exist yet")
        self.arithmetic = recipe if isinstance(recipe, Arithmetic) else Arithmetic(get_recipe(recipe))
        self.shape, self.spec, self.sinks = shape, replace(spec, align="bottom-right"), sinks
        self.cache = (
            make_cache("contiguous", shape, self.arithmetic.recipe, device) if cache is None else cache
        )
        if isinstance(self.cache, SlidingCache):
            self.cache.check(spec)
        for name, scale in zip("qkv", scales, strict=True):
            if scale is not None and (scale.dim() != 4 or scale.shape[2:] != (1, 1)):
                raise ValueError(
                    f"the scale of {name} is {tuple(scale.shape)}; allowed: [B|1, H|1, 1, 1] for all tokens"
                )
        self._fixed = dict(zip("qkv", scales, strict=True))
        self._by_token: dict[str, Tensor] = {}
        self._v_finite = True
        self._rows = 0  # queries so far

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.length

    @property
    def nbytes(self) -> int:
        """Bytes of the codes held, and of the scales that came with them: FP32, E8M0 where blocks are mx."""
        total = self.cache.nbytes
        for x in self._by_token.values():  # an mx scale is repeated for each value of its block
            total += x[..., ::MX_BLOCK].numel() * (E8M0_BYTES if x.shape[3] > 1 else FP32_BYTES)
        return total

    def step(self, q: Tensor, k: Tensor, v: Tensor, scales: Scales = NO_SCALES) -> tuple[Tensor, Tensor]:
        """Append n ≥ 0 tokens, then attend with their queries.

        q `[B, H, n, D]`, k `[B, Hkv, n, D]` and v `[B, Hkv, n, E]` are codes of the storage formats; `scales` are those
        of these tokens (`[B|1, H|1, n, 1]`). Returns out `[B, H, n, E]` and lse `[B, H, n]` in the base dtype, out
        rounded to the output format. A sliding cache too small for the chunk takes it in pieces. Raises ValueError for
        tensors that do not fit the session, before anything is appended.
        """
        n = q.shape[2] if q.dim() == 4 else -1
        self._check(q, k, v, n, scales)
        parts: list[tuple[Tensor, Tensor]] = []
        start = 0
        while start < n or not parts:
            stop = n
            if isinstance(self.cache, SlidingCache) and self.spec.left is not None:
                stop = min(n, start + self.cache.room(self.spec.left))
            new = slice(start, stop)
            sq, sk, sv = (None if s is None else s[:, :, new] for s in scales)
            self.append(k[:, :, new], v[:, :, new], sk, sv)
            parts.append(self.attend(q[:, :, new], q_scale=sq))
            start = stop
        return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def append(
        self, k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
    ) -> None:
        """Append tokens without a query: a prompt whose rows nobody asks for."""
        n, grown = k.shape[2], dict(self._by_token)
        for name, scale in (("k", k_scale), ("v", v_scale)):
            self._check_scale(name, scale, n)
            if scale is not None and n:
                new = scale.double().expand(self.shape.batch, self.shape.Hkv, -1, -1)
                grown[name] = torch.cat([grown[name], new], 2) if name in grown else new
        with torch.no_grad():
            self.cache.append(k, v)
        held = self.length - self.cache.first if isinstance(self.cache, SlidingCache) else self.length
        self._by_token = {name: x[:, :, x.shape[2] - held :] for name, x in grown.items()}
        self._v_finite = self._v_finite and bool(torch.isfinite(v.to(self.arithmetic.dtype)).all())

    def attend(
        self,
        q: Tensor,
        position: int | None = None,
        extras: Extras | None = None,
        q_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with q `[B, H, n, D]`, its first row at `position` (None: the last row meets the last token).

        `extras` speak of these rows and of the keys held. Raises ValueError when a row sees a key no longer held.
        """
        ar, n = self.arithmetic, q.shape[2]
        position = self.length - n if position is None else position
        with torch.no_grad():
            k, v = (x.contiguous() for x in self.cache.read(ar.dtype))  # a GEMM's last bits depend on strides
            held = k.shape[2]
            first = self.length - held
            if n and first > max(0, position - (self.spec.left or 0)):
                raise ValueError(
                    f"a query at {position} with window={self.spec.window} sees keys before {first}, the oldest held;"
                    f" allowed: smaller chunks or a larger sliding cache"
                )
            # kv_len sets where row 0 stands, max: rows that end before the first key see nothing wherever they stand.
            p = Problem(
                replace(self.shape, q_len=n, kv_len=n + max(position - first, -n)), self.spec,
                extras or Extras(sinks=self.sinks), q.to(ar.dtype).contiguous(), k, v,
                self._fixed["q"] if q_scale is None else q_scale.double(),
                self._scale("k", held), self._scale("v", held), v_finite=self._v_finite,
            )  # fmt: skip
            rows = slice(0, n)
            keys = key_range(p, rows)
            with _placed(ar, self._rows, first):
                result = attend(ar, p, rows, slice(min(keys.start, held), min(keys.stop, held)))
        self._rows += n
        return result

    def _scale(self, name: str, held: int) -> Tensor | None:
        return self._fixed[name] if held == 0 or name not in self._by_token else self._by_token[name]

    def _check(self, q: Tensor, k: Tensor, v: Tensor, n: int, scales: Scales) -> None:
        want = replace(self.shape, q_len=max(n, 0), kv_len=max(n, 0))
        for name, x, scale in zip("qkv", (q, k, v), scales, strict=True):
            if tuple(x.shape) != want.tensor(name):
                raise ValueError(
                    f"{name} is {tuple(x.shape)}; allowed: {want.tensor(name)} for {n} tokens of this session"
                )
            self._check_scale(name, scale, n)

    def _check_scale(self, name: str, scale: Tensor | None, n: int) -> None:
        if scale is not None:
            heads = self.shape.heads if name == "q" else self.shape.Hkv
            # An mx block of q or k lies within a token, one of v spans several.
            widths = (1,) if name == "v" else (1, self.shape.head_dim)
            if name in self._by_token:
                widths = (self._by_token[name].shape[3],)
            sizes = ((1, self.shape.batch), (1, heads), (n,), widths)
            if scale.dim() != 4 or any(a not in b for a, b in zip(scale.shape, sizes, strict=True)):
                last = "|".join(map(str, widths))
                allowed = f"[{self.shape.batch}|1, {heads}|1, {n}, {last}], one per token"
                if name == "v":
                    allowed += "; a scale of several keys is not known before the last of them"
                raise ValueError(f"the scale of {name} is {tuple(scale.shape)}; allowed: {allowed}")
            if self._fixed[name] is not None:
                raise ValueError(f"{name} has a scale for all tokens already; allowed: none with the tokens")
        if name == "q" or n == 0:
            return
        if (scale is None) == (name in self._by_token) and self.length:
            other = "come with their tokens" if scale is None else "are missing for earlier tokens"
            raise ValueError(f"scales of {name} {other}; allowed: with every token or with none")


def run_session(
    ar: Arithmetic, p: Problem, chunks: int | Sequence[int], kind: str = "contiguous", *,
    block_size: int = 16, seed: int | None = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A whole causal problem through one session: `chunks` rows a step (a number, or one per step).

    Keys that no row of the first chunk follows (kv_len > q_len) are in the cache before it. Raises ValueError for
    chunks that do not add up to q_len, and as `Session` does.
    """
    row_chunks = _row_chunks(p.shape.q_len, chunks)
    window = (p.spec.left or 0) + max([1, *(r.stop - r.start for r in row_chunks)])
    cache = make_cache(kind, p.shape, ar.recipe, p.q.device, block_size=block_size, seed=seed, window=window)
    if kind == "sliding" and p.spec.left is None:
        raise ValueError("a sliding cache needs a window; allowed: a spec with window=(left, 0)")
    if kind == "sliding" and p.extras.kv_lens is not None:
        raise ValueError("a sliding cache holds sequences of one length; allowed: no kv_lens")
    by_token = {
        n: s
        for n, s in (("q", p.q_scale), ("k", p.k_scale), ("v", p.v_scale))
        if s is not None and max(s.shape[2:]) > 1
    }
    fixed = tuple(
        None if n in by_token else s for n, s in zip("qkv", (p.q_scale, p.k_scale, p.v_scale), strict=True)
    )
    session = Session(p.shape, p.spec, ar, cache=cache, scales=(fixed[0], fixed[1], fixed[2]))
    shift = p.spec.shift(p.shape.q_len, p.shape.S)
    parts = []
    for rows in row_chunks:
        new = slice(session.length, max(session.length, min(p.shape.S, rows.stop + shift)))
        part = {n: s[:, :, rows if n == "q" else new] for n, s in by_token.items()}
        session.append(p.k[:, :, new], p.v[:, :, new], part.get("k"), part.get("v"))
        held = cache.first if isinstance(cache, SlidingCache) else 0
        extras = _extras_of(p, rows, slice(held, session.length), shift)
        parts.append(session.attend(p.q[:, :, rows], rows.start + shift, extras, part.get("q")))
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _row_chunks(q_len: int, chunks: int | Sequence[int]) -> list[slice]:
    """At least one, which may be empty."""
    if isinstance(chunks, int):
        if chunks < 1:
            raise ValueError(f"chunk is {chunks}; allowed: an integer ≥ 1")
        return [slice(a, min(a + chunks, q_len)) for a in range(0, max(q_len, 1), chunks)]
    sizes = list(chunks) or [0]
    if min(sizes) < 0 or sum(sizes) != q_len:
        raise ValueError(f"chunks are {sizes}; allowed: numbers ≥ 0 that add up to q_len = {q_len}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _extras_of(p: Problem, rows: slice, keys: slice, shift: int) -> Extras:
    """The problem's extras for these rows and the keys held, lengths aligned to the last of these rows.

    Row i of sequence b stands at i + n_b − L; among `rows` that is what a length n_b − L + rows.stop gives. Aligned
    top-left it stands at i whatever n_b is, which then only hides keys: a mask.
    """
    mask, bias, lens = p.extras.mask, p.extras.bias, p.extras.kv_lens
    if lens is not None and p.spec.align == "top-left":
        within = torch.arange(p.shape.S, device=lens.device) < lens.view(-1, 1, 1, 1)
        mask, lens = within if mask is None else mask & within, None
    return Extras(
        None if mask is None else slice_rows_keys(mask, rows, keys),
        None if bias is None else slice_rows_keys(bias, rows, keys),
        p.extras.sinks,
        None if lens is None else lens - p.shape.q_len + rows.stop,
    )


def chunked_decode(ar: Arithmetic, p: Problem, chunk: int = 16) -> tuple[Tensor, Tensor]:
    """`chunk` rows a step over a contiguous cache."""
    return run_session(ar, p, chunk)


def paged_decode(ar: Arithmetic, p: Problem, chunk: int = 16, block_size: int = 16) -> tuple[Tensor, Tensor]:
    """`chunk` rows a step over a paged cache with a shuffled table."""
    return run_session(ar, p, chunk, "paged", block_size=block_size)


CHUNKED_DECODE = Algorithm(
    "chunked_decode", chunked_decode, causal_only=True, appends_scales=True, options={"chunk": 16}
)
PAGED_DECODE = Algorithm(
    "paged_decode",
    paged_decode,
    causal_only=True,
    appends_scales=True,
    options={"chunk": 16, "block_size": 16},
)
