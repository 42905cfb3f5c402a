"""What a function takes, by its signature: `f(q, k, v, *, causal, scale, …) -> out` or `(out, lse)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

# What the harness gives, and the names it goes by. An option is passed when it is in use, or has no default.
OPTIONS = {
    "causal": ("causal", "is_causal"), "scale": ("scale", "sm_scale", "softmax_scale"), "align": ("align",),
    "window": ("window",), "softcap": ("softcap",), "empty_row": ("empty_row",), "mask": ("mask",), "bias": ("bias",),
    "sinks": ("sinks",), "kv_lens": ("kv_lens",), "q_scale": ("q_scale", "q_descale"),
    "k_scale": ("k_scale", "k_descale"), "v_scale": ("v_scale", "v_descale"), "cu_seqlens_q": ("cu_seqlens_q",),
    "cu_seqlens_k": ("cu_seqlens_k",), "max_seqlen_q": ("max_seqlen_q",), "max_seqlen_k": ("max_seqlen_k",),
}  # fmt: skip
ALWAYS = ("causal", "scale")  # passed with their value wherever they are taken


def taken(function: Callable[..., Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Option → the name it has in this function, and the options that have no default.

    `**options` takes everything by its first name. Raises ValueError for a signature that cannot be read, takes no q, k
    and v, or asks for something that is not known here.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(
            "its signature cannot be read; wrap it in a Python function f(q, k, v, *, causal, scale)"
        ) from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tensors = [p for p in parameters if p.kind in positional][:3]
    if len(tensors) < 3 and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        raise ValueError(
            f"it takes {_names(p.name for p in tensors)}; allowed: q, k and v first, then options by name"
        )
    rest = [p for p in parameters if p not in tensors]
    by_name = {alias: option for option, aliases in OPTIONS.items() for alias in aliases}
    names = {by_name[p.name]: p.name for p in rest if p.name in by_name and p.kind not in positional[:1]}
    bare = [
        p for p in rest if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]
    strange = [p.name for p in bare if p.name not in by_name]
    if strange:
        raise ValueError(
            f"it needs {_names(strange)}, which nobody gives; allowed: {_names(OPTIONS)}, or a default"
        )
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in rest):
        names = {
            **{option: aliases[0] for option, aliases in OPTIONS.items() if "seqlen" not in option},
            **names,
        }
    return names, tuple(by_name[p.name] for p in bare)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
