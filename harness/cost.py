"""What attention costs: operations and bytes, as integers, from sizes alone.

One multiply-add counts as 2 FLOPs. Softmax, O(B·H·L·S), is left out, as the source notes do.
"""

from __future__ import annotations

from functools import cache

from harness.formats import get_format
from harness.recipe import Recipe
from harness.scaling import FP32_BYTES, MX_BLOCK, Scaling
from harness.spec import AttentionSpec, Shape

SCALE_BYTES = FP32_BYTES  # of every scale but an mx block's


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
    block, head or tensor are spread over kv_len. A short last block has a scale like any other."""
    total = 0.0
    for tensor, width in (("k", shape.head_dim), ("v", shape.E)):
        total += shape.Hkv * width * get_format(recipe.storage[tensor]).bytes
        scaling = recipe.scaling.get(tensor)
        if scaling is not None and scaling.source != "unit":
            scales = _scales(scaling, tensor, shape, width)
            total += scaling.scale_bytes * scales / max(shape.S, 1)
    return total


def _scales(scaling: Scaling, tensor: str, shape: Shape, width: int) -> int:
    """Scales that one sequence of a cached tensor has (one, or one a head, even of an empty one)."""
    if scaling.granularity in ("tensor", "head"):
        return 1 if scaling.granularity == "tensor" else shape.Hkv
    rows, per_row = shape.S, 1
    if scaling.granularity == "mx":
        rows, per_row = (
            (-(-shape.S // MX_BLOCK), width) if tensor == "v" else (shape.S, -(-width // MX_BLOCK))
        )
    elif scaling.granularity == "block":
        rows = -(-shape.S // scaling.rows)
    return shape.Hkv * rows * per_row
