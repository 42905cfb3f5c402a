"""How accurate is a whole attention layer, LayerNorm(X + Attention(X W_Q, X W_K, X W_V) W_O)?

The implementation of each column is the attention inside. Shapes are those of its q, k and v. By name also: 64 decoding
steps, larger scores, outlier channels, and real weights (needs the extra `capture`; refused in one line without it).
"""

from harness import AttentionSpec, Case, Draw, LayerSpec, Shape

_SHAPE = Shape(1, 4, 48, 16, kv_heads=2)
_CAUSAL = AttentionSpec(causal=True)
_FOUR = ("fp32", "bf16", "fp16", "fp8_e4m3")


def _case(name, why, layer, shape=_SHAPE, **options):
    draw = options.pop("draw", Draw("layer"))
    return Case(
        "layer", name, shape, why, options.pop("spec", _CAUSAL), draw, seeds=1, layer=layer, **options
    )


CASES = [
    _case("training", "a whole sequence at once, grouped heads, rotary positions: what does each part add?",
          LayerSpec(64, rope=1e4)),
    _case("decoding", "the last tokens one at a time over cached K and V: the same rows as in training",
          LayerSpec(64, rope=1e4, steps=6), Shape(1, 4, 32, 16, kv_heads=2), recipes=_FOUR),
]  # fmt: skip

MORE = [
    _case("decoding-64", "64 steps: every row of the training form, from an empty cache",
          LayerSpec(64, rope=1e4, steps=64), Shape(1, 4, 64, 16, kv_heads=2), recipes=_FOUR),
    _case("encoder", "no mask and no positions: every token sees every other", LayerSpec(64), spec=AttentionSpec()),
    _case("batch", "two sequences, one query head a kv head", LayerSpec(96), Shape(2, 3, 33, 32)),
    _case("peaked", "scores of std 4: errors of q and k move weights", LayerSpec(64, rope=1e4),
          draw=Draw("layer", {"gain": 2.0})),
    _case("outlier-channels", "three channels of X 20 times as large, as trained models have",
          LayerSpec(64, rope=1e4), draw=Draw("layer", {"outliers": 3})),
    _case("tensor-scales", "one scale a weight matrix instead of one a channel",
          LayerSpec(64, rope=1e4, weight_scale="tensor"), recipes=("fp8_e4m3", "fp8_e4m3_unscaled")),
    *(
        _case(f"smollm2-{n:02d}", f"layer {n} of a trained model with its own weights, X its normalised input",
              LayerSpec(576, rope=1e5), Shape(1, 9, 64, 64, kv_heads=3), draw=Draw("smollm2_layer", {"layer": n}))
        for n in (0, 15, 29)
    ),
]  # fmt: skip
