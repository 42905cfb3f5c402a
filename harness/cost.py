"""What attention costs: operations and bytes, as integers, from sizes alone.

One multiply-add counts as 2 FLOPs. Softmax, O(B·H·L·S), is left out, as the source notes do.
"""

from __future__ import annotations

from functools import cache

from harness.formats import get_format
from harness.recipe import Recipe
from harness.spec import AttentionSpec, Shape

SCALE_BYTES = 4  # scales are FP32


@cache
def visible_pairs(shape: Shape, spec: AttentionSpec) -> int:
    """Query–key pairs that causality and the window leave visible, of one head of one batch."""
    shift, last = spec.shift(shape.q_len, shape.S), shape.S - 1
    pairs = 0
    for i in range(shape.q_len):
        position = i + shift
        low = 0 if spec.left is None else max(0, position - spec.left)
        high = last if spec.right is None else min(last, position + spec.right)
        pairs += max(0, high - low + 1)
    return pairs


def attention_flops(shape: Shape, spec: AttentionSpec) -> int:
    """2·D for a score and 2·E for its P·V, per visible pair: 4·L²·d over all heads when nothing is hidden."""
    return 2 * shape.batch * shape.heads * visible_pairs(shape, spec) * (shape.head_dim + shape.E)


def kv_bytes_per_token(shape: Shape, recipe: Recipe) -> float:
    """Bytes of K and V, codes and their scales, that one token of one layer holds; scales shared by the tokens of a
    head or tensor are spread over kv_len."""
    total = 0.0
    for tensor, width in (("k", shape.head_dim), ("v", shape.E)):
        total += shape.Hkv * width * get_format(recipe.storage[tensor]).bytes
        scaling = recipe.scaling.get(tensor)
        if scaling is not None and scaling.source != "unit":
            scales = {"tensor": 1 / max(shape.S, 1), "head": shape.Hkv / max(shape.S, 1), "token": shape.Hkv}
            total += SCALE_BYTES * scales[scaling.granularity]
    return total
