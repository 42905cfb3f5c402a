"""What is probed: a function of stored inputs, rules and extras. Adapters make one of an algorithm or of a callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from harness import registry
from harness.arithmetic import DTYPES
from harness.error_model import BLACK_BOX, Form, form_of
from harness.operands import Extras, check
from harness.quantize import Stored
from harness.recipe import TENSORS, Recipe
from harness.result import Refusal
from harness.spec import AttentionSpec

Tensors = tuple[Stored, Stored, Stored]


class Output(NamedTuple):
    """`out` `[B, H, L, E]`, `lse` `[B, H, L]` (natural) or None where the implementation gives none."""

    out: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True)
class Run:
    """`call(stored, spec, extras)` computes attention of stored q, k, v, or raises Refusal. `form`: how it arranges its
    sums, for the ceiling. `other_cache`: the same over another kind of cache, which must give the same bits."""

    call: Callable[[Tensors, AttentionSpec, Extras], Output]
    form: Form = BLACK_BOX
    other_cache: Run | None = field(default=None, repr=False)

    def __call__(self, stored: Tensors, spec: AttentionSpec, extras: Extras) -> Output:
        return self.call(stored, spec, extras)


_OTHER_CACHE = {"paged_decode": "chunked_decode", "chunked_decode": "paged_decode"}


def of_algorithm(algorithm: Any, recipe: Recipe, *, twin: bool = True, **options: int) -> Run:
    """A registered implementation (an object, not its name) under a recipe and its own options."""

    def call(stored: Tensors, spec: AttentionSpec, extras: Extras) -> Output:
        q, k, v = (x.codes for x in stored)
        shape, _ = check(q, k, v, spec)
        if refused := algorithm.refusals(spec, shape, recipe, extras.given):
            raise Refusal("; ".join(refused))
        result = algorithm.run_stored(stored, spec, recipe, extras, **options)
        return Output(result.out, result.lse)

    name, other = getattr(algorithm, "name", ""), None
    if twin and name in _OTHER_CACHE:
        other = of_algorithm(registry.get(_OTHER_CACHE[name]), recipe, twin=False)
    # Held to what attention is: an algorithm that says it subtracts no max would be promised nothing.
    form = replace(form_of(name, {**getattr(algorithm, "options", {}), **options}), subtract_max=True)
    return Run(call, form, other)


def of_callable(f: Callable[..., Any], recipe: Recipe, form: Form = BLACK_BOX) -> Run:
    """A user's `f(q, k, v, *, causal, scale, …) -> out` (or `(out, lse)`), on codes in the recipe's storage dtypes.

    It is given what its parameters name, among: causal, align, window, scale, softcap, empty_row, mask, bias, sinks,
    kv_lens, and scales (those of q, k and v). A call that needs a word it does not have is refused; without
    `align` it gets no causal call with q_len ≠ kv_len, since libraries differ there.
    """
    named = inspect.signature(f).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in named.values())

    def call(stored: Tensors, spec: AttentionSpec, extras: Extras) -> Output:
        words, needed = _words(stored, spec, extras)
        missing = [n for n in needed if n not in named and not anything]
        if missing:
            raise Refusal(f"the callable has no parameter {', '.join(missing)}")
        dtypes = (DTYPES[recipe.storage[n]] for n in TENSORS)
        q, k, v = (x.codes.to(dtype) for x, dtype in zip(stored, dtypes, strict=True))
        given = {n: x for n, x in words.items() if n in named or (anything and n in needed)}
        result = f(q, k, v, **given)
        return Output(*result) if isinstance(result, tuple) else Output(result)

    return Run(call, form)


def _words(stored: Tensors, spec: AttentionSpec, extras: Extras) -> tuple[Mapping[str, Any], list[str]]:
    """Every option by name, and those that this call cannot do without."""
    default, scales = AttentionSpec(), tuple(x.scale for x in stored)
    q, k, _ = (x.codes for x in stored)
    words: dict[str, Any] = {
        n: getattr(spec, n) for n in ("causal", "align", "window", "softcap", "empty_row")
    }
    needed = [n for n in ("causal", "window", "softcap", "scale") if getattr(spec, n) != getattr(default, n)]
    positioned = spec.causal or spec.window is not None
    if positioned and q.shape[2] != k.shape[2]:
        needed.append("align")
    words["scale"] = spec.scale_for(q.shape[3])
    words.update(extras.as_options())
    needed += extras.given
    words["scales"] = scales
    if any(s is not None for s in scales):
        needed.append("scales")
    return words, needed
