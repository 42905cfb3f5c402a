"""What one attention call costs: operations and bytes, as integers, from sizes alone.

One multiply-add counts as 2 FLOPs. Softmax, O(B·H·L·S), is left out, as the source notes do.
"""

from __future__ import annotations

from harness.formats import get_format
from harness.recipe import Recipe
from harness.scaling import FP32_BYTES, MX_BLOCK, Scaling
from harness.spec import AttentionSpec, Shape

SCALE_BYTES = FP32_BYTES  # of every scale but an mx block's


def visible_pairs(shape: Shape, spec: AttentionSpec) -> int:
    """Query–key pairs that causality and the window leave visible, of one head of one batch."""
    first = spec.shift(shape.q_len, shape.S)
    last = first + shape.q_len - 1

    def up_to(side: int | None) -> int:
        """Pairs with key ≤ position + side: Σ over the rows of position + side + 1, held within 0 … S."""
        if side is None:
            return shape.q_len * shape.S
        return _held_sum(last + side + 1, shape.S) - _held_sum(first + side, shape.S)

    return up_to(spec.right) - (0 if spec.left is None else up_to(-spec.left - 1))


def _held_sum(n: int, top: int) -> int:
    """Σ of min(x, top) over 0 < x ≤ n."""
    inside = min(max(n, 0), top)
    return inside * (inside + 1) // 2 + max(n - top, 0) * top


def attention_flops(shape: Shape, spec: AttentionSpec) -> int:
    """2·D for a score and 2·E for its P·V, per visible pair: 4·L²·d over all heads when nothing is hidden."""
    return 2 * shape.batch * shape.heads * visible_pairs(shape, spec) * (shape.head_dim + shape.E)


def attention_bytes(shape: Shape, recipe: Recipe) -> int:
    """Bytes of q, k, v and out, each moved once, with the scales of k and v: the least that a call moves."""
    q, out = (
        shape.batch * shape.heads * shape.q_len * shape.head_dim,
        shape.batch * shape.heads * shape.q_len * shape.E,
    )
    own = q * get_format(recipe.storage["q"]).bytes + out * get_format(recipe.out_format).bytes
    return own + kv_cache_bytes(shape, recipe)


def kv_bytes_per_token(shape: Shape, recipe: Recipe) -> float:
    """Bytes of K and V, codes and their scales, that one token of one layer holds; scales shared by the tokens of a
    block, head or tensor are spread over kv_len. A short last block has a scale like any other."""
    codes, scales = _kv_bytes(shape, recipe)
    return codes + scales / max(shape.S, 1)


def kv_cache_bytes(shape: Shape, recipe: Recipe) -> int:
    """Bytes of K and V of `shape.batch` sequences of kv_len tokens in one layer, codes and their scales. An empty cache
    has none, whatever it has set aside."""
    codes, scales = _kv_bytes(shape, recipe)
    return shape.batch * (codes * shape.S + scales) if shape.S else 0


def _kv_bytes(shape: Shape, recipe: Recipe) -> tuple[int, int]:
    """Bytes of the codes of one token, and of the scales of one sequence."""
    codes = scales = 0
    for tensor, width in (("k", shape.head_dim), ("v", shape.E)):
        codes += shape.Hkv * width * get_format(recipe.storage[tensor]).bytes
        scaling = recipe.scaling.get(tensor)
        if scaling is not None and scaling.source != "unit":
            scales += scaling.scale_bytes * _scales(scaling, tensor, shape, width)
    return codes, scales


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
