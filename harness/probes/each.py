"""The table of probes, and the run through it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from harness.operands import NO_EXTRAS, Extras
from harness.probes import pairs, values
from harness.probes.runs import Run, of_algorithm
from harness.probes.setting import MOST_SCORES, Finding, Probe, Setting
from harness.recipe import Recipe, get_recipe
from harness.records import Status
from harness.result import Fallen, tried
from harness.spec import AttentionSpec, Shape

PROBES: dict[str, tuple[str, Callable[[Setting], Finding]]] = {
    "ones": ("values of one come out as one", values.ones),
    "identity": ("V = identity reads the weights: hidden ones are 0, a row's add up", values.identity),
    "one-hot": ("a row whose weight lies on one key is that key's value", values.one_hot),
    "head tags": ("a query head reads its own kv head", values.head_tags),
    "last element": ("the last channel, the last value and the last key are read", values.last_element),
    "lse": ("the log-sum-exp is that of the scores", values.lse),
    "permuted keys": ("keys in another order", pairs.permuted),
    "scores + c": ("a constant added to all scores", partial(pairs.shifted, sign=1.0)),
    "scores − c": ("a constant subtracted from all scores", partial(pairs.shifted, sign=-1.0)),
    "4K, scale/4": ("keys times 4, scale divided by 4", pairs.key_scale),
    "2V": ("values times 2 double the output", pairs.value_scale),
    "unseen changed": ("keys changed that a row does not see", pairs.future),
    "unseen poisoned": ("keys poisoned that a row does not see, others do", pairs.future_poisoned),
    "hidden poisoned": ("keys poisoned that no row sees", pairs.hidden_poisoned),
    "padded keys": ("keys beyond kv_lens", pairs.padded),
    "row alone": ("a row alone: the last one is a decoding step", pairs.row_alone),
    "sequence alone": ("each sequence without its batch", pairs.sequence_alone),
    "head alone": ("each kv head without the others", pairs.head_alone),
    "chunked": ("rows in chunks over the keys so far", pairs.chunked),
    "other cache": ("the same over another kind of cache", pairs.other_cache),
    "split keys": ("parts of the keys merged by their lse", pairs.merged),
}  # fmt: skip


def probes(
    run: Run | Any, shape: Shape, spec: AttentionSpec | None = None, recipe: str | Recipe = "fp32", seed: int = 0,
    extras: Extras = NO_EXTRAS,
) -> tuple[Probe, ...]:  # fmt: skip
    """Every probe of `PROBES`, in its order, of an implementation under these options: a `Run` (`of_callable` makes
    one of a user's function) or a registered implementation's object.

    `extras` fit the shape, as `operands.check` gives them. What an implementation raises is a FAIL with its message, a
    `Refusal` is REFUSED. The same seed gives the same inputs. Raises ValueError for a shape of more than 2^16 scores.
    """
    scores = shape.batch * shape.heads * shape.q_len * shape.S
    if scores > MOST_SCORES:
        raise ValueError(f"{shape} has {scores} scores; allowed: at most {MOST_SCORES}, probes need no more")
    recipe = get_recipe(recipe)
    run = of_algorithm(run, recipe) if hasattr(run, "run_stored") else run
    setting = Setting(run, shape, spec or AttentionSpec(), recipe, extras, seed)
    return tuple(_probe(name, what, ask, setting) for name, (what, ask) in PROBES.items())


def _probe(name: str, what: str, ask: Callable[[Setting], Finding], setting: Setting) -> Probe:
    found = tried(lambda: ask(setting))
    if isinstance(found, Fallen):
        (said,) = found.reasons
        if found.status is Status.REFUSED:
            return Probe(name, what, Status.REFUSED, detail=said)
        return Probe(name, what, Status.FAIL, "an output", said.partition("\n")[0])
    outcome = Status.PASS if found.ok else Status.FAIL
    return Probe(name, what, outcome, found.expected, found.seen, found.where, found.detail)
