"""How accurate is attention on what a trained model computes?

Q, K and V after RoPE of SmolLM2-135M (Apache-2.0) on an English text, shipped in `data/` with their provenance.
Regenerate with `python -m harness capture`.
"""

from harness import AttentionSpec, Case, Draw, Shape

TOKENS = 256

_ALL = [
    Case(
        "real", f"smollm2-layer{layer:02d}", Shape(heads=9, kv_heads=3, q_len=TOKENS, head_dim=64),
        f"real activations of layer {layer}: outlier channels, a first token that draws mass, scores far from normal",
        AttentionSpec(causal=True),
        Draw("file", {"path": "data/smollm2-qkv.safetensors", "prefix": f"layer{layer:02d}", "tokens": TOKENS}),
    )
    for layer in (0, 7, 15, 22, 29)
]  # fmt: skip

CASES = _ALL[::2]
MORE = _ALL[1::2]  # where this file is named: a layer takes as long as a whole other group
