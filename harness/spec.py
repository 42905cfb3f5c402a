"""What is to be computed: the sizes (`Shape`) and the rules of attention (`AttentionSpec`), and the layer around it
(`LayerSpec`).

With q_len = L, kv_len = S, query row i and key j (0-based), the position of row i among the keys is
i + S − L when aligned bottom-right (the last query meets the last key) and i when aligned top-left. With ragged
`kv_lens`, S is the row's own length. Then

    s = scale·(q·k);  s = softcap·tanh(s / softcap);  s = s + bias;  hidden keys become −∞;  o = softmax(s) V

and key j is visible when  j ≤ position (causal)  and  position − left ≤ j ≤ position + right (window).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ALIGNMENTS = ("bottom-right", "top-left")
EMPTY_ROWS = ("zero", "nan")
WEIGHT_SCALES = ("channel", "tensor")
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # FP32's normal range, in which kernels take numbers


@dataclass(frozen=True)
class AttentionSpec:
    """The rules of one attention call.

    `window=(left, right)`: keys visible to either side of the query's own position, each ≥ 0 or None for
    unlimited; a sliding window of w keys is `(w − 1, 0)`. `scale` None is head_dim^-½ (1 when head_dim is 0).
    `softcap` None is off. `empty_row`: a row that sees no key is 0 with lse −∞ ("zero") or NaN ("nan").

    Raises ValueError for a value outside these ranges.
    """

    causal: bool = False
    align: str = "bottom-right"
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    empty_row: str = "zero"

    def __post_init__(self) -> None:
        if self.align not in ALIGNMENTS:
            raise ValueError(f"align is {self.align!r}; allowed: {', '.join(ALIGNMENTS)}")
        if self.empty_row not in EMPTY_ROWS:
            raise ValueError(f"empty_row is {self.empty_row!r}; allowed: {', '.join(EMPTY_ROWS)}")
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal is {self.causal!r}; allowed: True, False")
        if self.scale is not None and not (_finite(self.scale) and abs(self.scale) <= LARGEST):
            raise ValueError(
                f"scale is {self.scale!r}; allowed: a finite number, up to FP32's {LARGEST:.3g}, or None for"
                " head_dim^-0.5"
            )
        if self.softcap is not None and not (_finite(self.softcap) and SMALLEST <= self.softcap <= LARGEST):
            raise ValueError(
                f"softcap is {self.softcap!r}; allowed: a finite number > 0 that FP32 holds, {SMALLEST:.3g} to"
                f" {LARGEST:.3g}, or None for off"
            )
        if self.window is not None:
            object.__setattr__(self, "window", _window(self.window))

    def scale_for(self, head_dim: int) -> float:
        """The factor on q·k."""
        if self.scale is not None:
            return float(self.scale)
        return 1.0 if head_dim == 0 else float(head_dim) ** -0.5

    @property
    def left(self) -> int | None:
        """How many keys before its own position a row sees; None = all."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """How many keys after its own position a row sees; None = all. Causal means none."""
        if self.causal:
            return 0
        return None if self.window is None else self.window[1]

    def shift(self, q_len: int, kv_len: int) -> int:
        """Position of query row 0 among the keys."""
        return kv_len - q_len if self.align == "bottom-right" else 0


def _finite(value: object) -> bool:
    """Whether this is a finite number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    allowed = "a pair (left, right), each an integer from 0 to 2**62 or None for unlimited"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}; allowed: {allowed}")
    for side in window:
        if side is not None and (
            isinstance(side, bool) or not isinstance(side, int) or not 0 <= side <= 2**62
        ):
            raise ValueError(f"window is {window!r}; allowed: {allowed}")
    return (window[0], window[1])


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem: q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]`.

    `kv_heads` None is `heads`; `kv_len` None is `q_len`; `value_dim` None is `head_dim`. Raises ValueError for a
    negative size, no heads, or heads that kv_heads does not divide.
    """

    batch: int = 1
    heads: int = 1
    q_len: int = 1
    head_dim: int = 64
    kv_heads: int | None = None
    kv_len: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name, default in (("kv_heads", self.heads), ("kv_len", self.q_len), ("value_dim", self.head_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, least in (
            ("batch", 0), ("heads", 1), ("kv_heads", 1), ("q_len", 0), ("kv_len", 0), ("head_dim", 0), ("value_dim", 0)
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; allowed: an integer ≥ {least}")
        if self.heads % self.Hkv:
            raise ValueError(
                f"{self.heads} query heads over {self.kv_heads} kv heads; allowed: a multiple of the kv heads"
            )

    @property
    def Hkv(self) -> int:
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def S(self) -> int:
        assert self.kv_len is not None
        return self.kv_len

    @property
    def E(self) -> int:
        assert self.value_dim is not None
        return self.value_dim

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.Hkv

    def tensor(self, name: str) -> tuple[int, int, int, int]:
        """Size of `q`, `k`, `v` or `out`."""
        return {
            "q": (self.batch, self.heads, self.q_len, self.head_dim),
            "k": (self.batch, self.Hkv, self.S, self.head_dim),
            "v": (self.batch, self.Hkv, self.S, self.E),
            "out": (self.batch, self.heads, self.q_len, self.E),
        }[name]

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}×{self.kv_len}"
        width = f"{self.head_dim}" if self.head_dim == self.E else f"{self.head_dim}→{self.value_dim}"
        return f"[{self.batch}, {heads}, {lengths}, {width}]"


def rules_in_spec(function: Callable[P, R]) -> Callable[P, R]:
    """A function that takes its rules as `spec=`. Rules given as keywords of its own raise a TypeError that says so."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        wrong = {name: x for name, x in keywords.items() if name in _RULES and name not in known}
        if wrong:
            given, fields = (", ".join(f"{n}={x!r}" for n, x in d.items()) for d in (wrong, _as_rules(wrong)))
            raise TypeError(
                f"{function.__name__}() was given {given}; the rules of a call go together:"
                f" spec=harness.AttentionSpec({fields})"
            )
        return function(*args, **keywords)

    return call


# The fields of AttentionSpec, and what kernels call them.
_RULES = {
    **{f.name: f.name for f in fields(AttentionSpec)},
    "is_causal": "causal", "sm_scale": "scale", "softmax_scale": "scale", "window_size": "window",
    "logits_soft_cap": "softcap",
}  # fmt: skip


def _as_rules(given: Mapping[str, object]) -> dict[str, object]:
    return {_RULES[name]: x for name, x in given.items()}


def parse_shape(text: str) -> Shape:
    """`B,H,L,D`, or `B,H,L,S,D` for S keys; `H/G` heads share G kv heads. Raises ValueError."""
    batch, _, rest = text.partition(",")
    heads, _, rest = rest.partition(",")
    heads, slash, shared = heads.partition("/")
    numbers = [batch, heads, *([shared] if slash else []), *rest.split(",")]
    if len(rest.split(",")) not in (2, 3) or not all(n.strip().isdecimal() for n in numbers):
        raise ValueError(
            f"shape is {text!r}; allowed: B,H,L,D or B,H,L,S,D, such as 1,8,4096,64 or 1,8/2,1,4096,64"
        )
    length, *keys, width = (int(n) for n in rest.split(","))
    return Shape(
        int(batch), int(heads), length, width, int(shared) if slash else None, keys[0] if keys else None
    )


@dataclass(frozen=True)
class LayerSpec:
    """The layer around attention: X `[B, T, D]` to LayerNorm(X + Z) of the same size, D = `width`.

    `rope`: the base of rotary positions, None for none; channels i and i + H/2 turn together (so H is even). `eps` is
    LayerNorm's. `weight_scale`: where weights are scaled into a narrow format, one scale per output `channel` or one a
    `tensor`. `steps` None is the training form, the whole sequence at once; a number says that the last so many tokens
    are decoded one at a time over cached K and V.

    Raises ValueError for a value outside these ranges.
    """

    width: int
    rope: float | None = None
    eps: float = 1e-5
    weight_scale: str = "channel"
    steps: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("width", self.width, 1),
            ("steps", 0 if self.steps is None else self.steps, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; allowed: an integer ≥ {least}")
        if self.rope is not None and not (_finite(self.rope) and self.rope > 0):
            raise ValueError(f"rope is {self.rope!r}; allowed: a base > 0, or None for no rotation")
        if not (_finite(self.eps) and self.eps > 0):
            raise ValueError(f"eps is {self.eps!r}; allowed: a finite number > 0")
        if self.weight_scale not in WEIGHT_SCALES:
            raise ValueError(f"weight_scale is {self.weight_scale!r}; allowed: {', '.join(WEIGHT_SCALES)}")

    def check(self, shape: Shape, spec: AttentionSpec) -> None:
        """Raises ValueError where the attention inside does not fit: q, k and v all come from X."""
        if shape.q_len != shape.S or shape.head_dim != shape.E:
            raise ValueError(
                f"the shape of a layer is {shape}; allowed: one length and one head width, q, k and v come from one X"
            )
        if self.rope is not None and shape.head_dim % 2:
            raise ValueError(
                f"head_dim is {shape.head_dim} with rope; allowed: an even one, channels turn in pairs"
            )
        if self.steps is not None and not (spec.causal and self.steps <= shape.q_len):
            raise ValueError(
                f"steps is {self.steps} of {shape.q_len} tokens, causal={spec.causal}; allowed: at most the tokens, and"
                " causal attention: a later token does not exist yet"
            )
