"""Does every way of hiding keys hide them, and nothing else?"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)
_RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager", "fp16_eager")
_FULL = AttentionSpec()
_SHAPE = Shape(batch=2, heads=4, kv_heads=2, q_len=37, kv_len=53, head_dim=40)
_SQUARE = Shape(batch=2, heads=2, q_len=48, head_dim=64)


def _case(name, why, spec=_FULL, shape=_SHAPE, draw=None, **extras):
    return Case("masks", name, shape, why, spec, draw or Draw(), extras=extras, seeds=1, recipes=_RECIPES)


CASES = [
    *(
        _case(
            f"bool-{axes or 'one'}", f"a boolean mask of axes {axes or 'none'}, broadcast over the others (F07)",
            mask=Draw("random", {"keep": 0.7, "axes": axes}),
        )
        for axes in ("S", "L", "LS", "HS", "BS", "BHLS")
    ),
    _case(
        "window-4", "a sliding window of four keys, the own one included (F15)",
        AttentionSpec(causal=True, window=(3, 0)),
    ),
    _case(
        "window-own-key", "a window of the own key alone: out is V there (F16)",
        AttentionSpec(causal=True, window=(0, 0)),
    ),
    _case("window-both-sides", "keys to either side, as in local encoders", AttentionSpec(window=(5, 2))),
    _case(
        "window-top-left", "a window counted from the first query's own key",
        AttentionSpec(window=(5, 2), align="top-left"),
    ),
    _case(
        "window-wide", "a window wider than the sequence is no window (F16)",
        AttentionSpec(causal=True, window=(60, 0)),
    ),
    _case(
        "softcap", "capped scores (Gemma 2): cap before the mask, or −∞ becomes −cap",
        AttentionSpec(causal=True, softcap=8.0),
    ),
    _case(
        "band-n600", "a band so narrow that late rows hide the first KV blocks whole (F02)",
        AttentionSpec(causal=True, window=(9, 0)), Shape(heads=1, q_len=600, head_dim=8),
    ),
    _case("left-padding", "27 of 48 slots are padding on the left: causal rows there see nothing (F05)",
          _CAUSAL, _SQUARE,
          mask=Draw("padding", {"lengths": [48, 21], "side": "left", "queries": True})),
    _case("right-padding", "padding on the right, by a mask: alignment stays where it is", _CAUSAL, _SQUARE,
          mask=Draw("padding", {"lengths": [48, 21]})),
    _case("ragged", "lengths of each sequence: bottom-right meets each one's own last key", _CAUSAL,
          kv_lens=Draw("values", {"values": [53, 29]})),
    _case("ragged-empty", "one sequence has no key at all", _FULL, kv_lens=Draw("values", {"values": [0, 53]})),
    _case("ragged-top-left", "lengths under top-left alignment only hide", AttentionSpec(causal=True, align="top-left"),
          kv_lens=Draw("values", {"values": [11, 53]})),
    _case("packed-3+5+40", "three sequences in one row: none may see another (F17)", _FULL, _SQUARE,
          mask=Draw("packed", {"lengths": [3, 5, 40]})),
    _case("empty-rows", "two rows see nothing: 0 with lse −∞ (F01)", mask=Draw("rows", {"hidden": [1, 36]})),
    _case("last-key-alone", "only the last key is visible: an index that wraps reads another (F41)",
          mask=Draw("keys", {"visible": [-1]})),
    _case("bias", "a relative position bias: added to the scaled scores, never scaled itself (F08)",
          bias=Draw("normal", {"std": 2.0})),
    _case("bias-per-key", "a bias of the keys alone, broadcast", bias=Draw("normal", {"std": 2.0, "axes": "S"})),
    _case("bias-softcap", "cap, then bias: the other order caps the bias too", AttentionSpec(softcap=4.0),
          bias=Draw("normal", {"std": 1.0})),
    *(
        _case(
            f"alibi-{heads}", f"ALiBi with {heads} heads, no power of two: interleaved slopes (F46)", _CAUSAL,
            Shape(heads=heads, q_len=24, kv_len=40, head_dim=16), bias=Draw("alibi"),
        )
        for heads in (6, 12, 40)
    ),
    _case("alibi-encoder", "ALiBi without causality: the future falls off as the past does", _FULL, bias=Draw("alibi")),
    *(
        _case(
            f"finfo-min-{fmt}",
            f"padding and causality by {fmt}'s finfo.min, added up in FP32: rows with nothing else attend"
            " to what was meant as hidden, and sums overflow in their own format (F05)", _FULL, _SQUARE,
            bias=Draw("hiding", {"value": fmt, "lengths": [48, 21], "causal": True}),
        )
        for fmt in ("fp16", "bf16")
    ),
    _case("minus-1e4", "padding by −1e4, BERT's way: a row of nothing else is not empty", _CAUSAL, _SQUARE,
          bias=Draw("hiding", {"value": -1e4, "lengths": [48, 21]})),
    _case("everything", "GQA, ragged lengths, window, softcap, bias and sinks together",
          AttentionSpec(causal=True, window=(20, 0), softcap=10.0), mask=Draw("random", {"keep": 0.9, "axes": "LS"}),
          bias=Draw("normal"), sinks=Draw("normal"), kv_lens=Draw("values", {"values": [53, 40]})),
]  # fmt: skip
