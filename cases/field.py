"""Do the faults that people reported show, and does attention that is right pass?

Each entry is a public report, cut down to the smallest call that shows it and that can still be judged: where the
report has one row, heads of other numbers stand beside it. Where a report and mathematics disagree, mathematics wins.
`benchmarks/field_faults.py` plants each fault, `reports/field.md` is what was seen.
"""

from harness import AttentionSpec, Case, Draw, Shape

_GITHUB = "https://github.com/"
# What was reported, and the first thread that reports it.
ENTRIES = {
    "F01": ("fully masked row", "pytorch/pytorch/issues/103749"),
    "F02": ("leading KV blocks masked", "pytorch/pytorch/issues/127055"),
    "F03": ("NaN in hidden positions", "pytorch/pytorch/issues/101967"),
    "F05": ("NaN from left padding", "unslothai/unsloth/pull/9848"),
    "F06": ("mask polarity", "rasbt/LLMs-from-scratch/issues/1061"),
    "F07": ("mask broadcast", "tenstorrent/tt-metal/issues/39946"),
    "F08": ("bias scaled with logits", "tenstorrent/tt-metal/issues/55337"),
    "F11": ("causal alignment", "pytorch/pytorch/issues/103082"),
    "F12": ("q longer than kv", "Dao-AILab/flash-attention/issues/1778"),
    "F15": ("sliding window off by one", "huggingface/transformers/issues/39408"),
    "F16": ("window ignored or zero", "unslothai/unsloth/pull/8253"),
    "F17": ("packed sequences leak", "Tencent-Hunyuan/HunyuanVideo/pull/310"),
    "F18": ("FP16 QK overflow (Qwen2)", "QwenLM/Qwen3/issues/910"),
    "F19": ("no scaling, large logits (T5, SD 2.1)", "huggingface/transformers/issues/11461"),
    "F20": ("activations near FP16's limit (Gemma 3)", "huggingface/transformers/issues/39972"),
    "F21": ("cache cast overflow", "NVIDIA/kvpress/issues/250"),
    "F22": ("BF16 huge values", "pytorch/pytorch/issues/121558"),
    "F23": ("running-max sentinel", "FluxML/NNlib.jl/pull/43"),
    "F24": ("BF16 math against flash", "pytorch/pytorch/pull/128922"),
    "F25": ("wrong yardstick", "Dao-AILab/flash-attention/issues/1138"),
    "F27": ("CPU accumulation width", "uxlfoundation/oneDNN/pull/3332"),
    "F28": ("subnormals", "pytorch/pytorch/issues/150007"),
    "F29": ("positions in BF16", "huggingface/candle/pull/3520"),
    "F30": ("flex and compile numerics", "pytorch/pytorch/issues/135161"),
    "F31": ("GQA head map", "onnx/onnx/pull/7274"),
    "F32": ("wrong scale after padding, MLA", "intel/ipex-llm/pull/12619"),
    "F33": ("V width differs", "pytorch/pytorch/issues/176767"),
    "F34": ("head dim not a power of 2", "66RING/tiny-flash-attention/issues/12"),
    "F35": ("length not a block multiple", "thu-ml/SageAttention/pull/377"),
    "F37": ("zero-width q and k", "pytorch/pytorch/issues/184330"),
    "F41": ("index overflow", "pytorch/pytorch/issues/162588"),
    "F43": ("empty split merge", "flashinfer-ai/flashinfer/issues/4051"),
    "F45": ("attention sink", "NVIDIA/TransformerEngine/issues/2541"),
    "F46": ("ALiBi slopes", "ml-explore/mlx/issues/343"),
    "F47": ("paged KV", "vllm-project/vllm/issues/42494"),
    "F48": ("decode against prefill", "huggingface/transformers/issues/25420"),
    "F49": ("FP8 block dependence", "sgl-project/sglang/issues/25790"),
    "F50": ("batch invariance", "deepseek-ai/FlashMLA/issues/212"),
    "F51": ("E4M3 overflow rule", "jax-ml/ml_dtypes/issues/400"),
    "F53": ("zero amax", "ROCm/aiter/issues/4289"),
    "F54": ("unit KV scale", "vllm-project/vllm/pull/11906"),
    "F55": ("scale not folded, wrong granularity", "lightseekorg/tokenspeed/pull/759"),
    "F57": ("FP8 P saturation", "Dao-AILab/flash-attention/issues/2716"),
    "F58": ("tolerance too tight (flaky)", "sgl-project/sglang/pull/35795"),
    "F60": ("NaN-blind comparison", "tracel-ai/cubecl/pull/1070"),
    "F61": ("how to set tolerances", "thu-ml/SageAttention/issues/10"),
    "F62": ("FP8 accuracy report wanted", "Dao-AILab/flash-attention/issues/1169"),
    "F63": ("timing gate noise", "ionelmc/pytest-benchmark/issues/276"),
}
_FULL, _CAUSAL = AttentionSpec(), AttentionSpec(causal=True)
_FP32, _BF16, _FP16, _FP8 = ("fp32",), ("bf16",), ("fp16",), ("fp8_e4m3",)


def _case(name, shape, why, spec=_FULL, draw=None, recipes=_BF16, relations=False, **extras):
    """`name` begins with the entry's number."""
    title, thread = ENTRIES[name[:3].upper()]
    why = f"{title}: {why} ({name[:3].upper()}, {_GITHUB}{thread})"
    return Case(
        "field", name, shape, why, spec, draw or Draw(), extras=extras, seeds=1, recipes=recipes, relations=relations,
    )  # fmt: skip


def _edited(*edits, **normal):
    return Draw("edited", {"edits": edits, **normal})


def _rows(heads, q_len, kv_len=None, head_dim=8, **more):
    return Shape(heads=heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, **more)


_MASKS = [
    _case("f01-empty-row", _rows(4, 3, 4), "row 1 sees no key and is 0 with lse −∞, not NaN; rows 0 and 2 stay",
          recipes=_FP32, mask=Draw("rows", {"hidden": [1]})),
    _case("f02-band", _rows(1, 400, head_dim=4), "−∞ leaves keys i − 9 … i: late rows hide their first KV blocks whole,"
          " and the running max is −∞ until then", recipes=_FP32, bias=Draw("hiding", {"value": "-inf", "causal": True,
          "window": [9, 0]})),
    _case("f03-nan-in-hidden-slots", _rows(8, 1, 5, 4), "rows 3 and 4 of K and V are NaN and hidden: 0 times NaN is"
          " NaN, a hidden key is no term at all", draw=_edited(("kv", None, [3, 4], None, "set", "nan")), recipes=_FP32,
          mask=Draw("keys", {"visible": [0, 1, 2]})),
    _case("f05-left-padding", _rows(2, 33, head_dim=16, batch=2), "27 of 33 slots are padding on the left: causal rows"
          " there see nothing and are 0", _CAUSAL, mask=Draw("padding", {"lengths": [33, 6], "side": "left",
          "queries": True})),
    _case("f06-triangle", _rows(4, 16), "True = attend: a mask made for True = hide shows the future alone",
          mask=Draw("packed", {"lengths": [16]})),
    *(_case(f"f07-mask-{axes}", _rows(3, 4, 5), f"a mask of axes {axes} is the mask expanded to all",
            mask=Draw("random", {"keep": 0.6, "axes": axes})) for axes in ("S", "L", "HS", "LS")),
    *(_case(f"f07-bias-{axes}", _rows(3, 4, 5), f"a bias of axes {axes} is the bias expanded to all",
            bias=Draw("normal", {"axes": axes}))
      for axes in ("S", "HS", "LS")),
    _case("f08-finite-bias", _rows(8, 8, 16, 64), "q = 0 and a bias of −j: neighbouring weights differ by e; 0 and −∞"
          " hide that a bias is scaled", draw=_edited(("q", None, None, None, "times", 0.01)), recipes=_FP32,
          bias=Draw("values", {"values": [-float(j) for j in range(16)]})),
    _case("f11-bottom-right", _rows(8, 2, 5), "the last query meets the last key: rows see 4 and 5 keys", _CAUSAL),
    _case("f11-decode", _rows(8, 1, 5), "one query sees all 5 keys, not key 0 alone", _CAUSAL),
    _case("f11-top-left", _rows(8, 2, 5), "the other convention, where it is asked for: rows see 1 and 2 keys",
          AttentionSpec(causal=True, align="top-left")),
    _case("f12-more-queries", _rows(4, 5, 2), "rows 0 to 2 stand before the first key and are 0", _CAUSAL),
    _case("f15-window-4", _rows(4, 12), "a window of 4 keys is (3, 0): no row sees a fifth",
          AttentionSpec(causal=True, window=(3, 0))),
    _case("f16-window-none", _rows(4, 12), "None is no window: full causal", AttentionSpec(causal=True)),
    _case("f16-window-own", _rows(4, 12), "a window of 1 is the own key alone; 0 keys cannot be asked for: a side ≥ 0"
          " or None is this project's convention, 0 = off belongs to libraries' adapters",
          AttentionSpec(causal=True, window=(0, 0))),
    _case("f16-window-4", _rows(4, 12), "a window of 4 keys that must reach the kernel",
          AttentionSpec(causal=True, window=(3, 0))),
    _case("f16-window-wide", _rows(4, 12), "wider than the sequence: full causal",
          AttentionSpec(causal=True, window=(16, 0))),
    _case("f17-packed-3+5", _rows(4, 8), "3 and 5 tokens in one row, each sequence alone",
          mask=Draw("packed", {"lengths": [3, 5]})),
]  # fmt: skip

_SIGNS = (
    ("qk", None, None, None, "set", 32.0),
    ("k", None, [1], [0, 1], "set", 31.75),
    ("k", None, [2], None, "set", -32.0),
)
_RANGES = [
    _case("f18-raw-131072", _rows(8, 1, 3, 128), "raw scores ±131072, scaled ±11585: stored in FP16 before the scale"
          " they are ±∞, and ∞ − ∞ is NaN. Keys 0 and 1 are 16 apart, so that the weight is not 1 alone",
          draw=_edited(*_SIGNS), recipes=_FP16),
    _case("f19-no-scale", _rows(8, 1, 3, 8), "raw scores ±115712 with scale 1: an FP32 softmax does not help scores"
          " that were infinite before it. Eight channels, since FP32 itself says little of a sum of 128 such terms",
          AttentionSpec(scale=1.0), recipes=_FP16,
          draw=_edited(("qk", None, None, None, "set", 128.0), ("q", None, None, [0], "set", 8.0),
                       ("k", None, [1], [0], "set", 127.875), ("k", None, [2], None, "set", -128.0))),
    *(_case(f"f20-v-60000-amp-{amp}", _rows(2, 8, 16, 256), f"V holds 60000, q is {amp} times k: the output stays"
            " within V's hull, a sum that is not yet divided does not",
            draw=_edited(("v", None, [0, 3, 7, 12], None, "set", 60000.0), q=float(amp)), recipes=_FP16)
      for amp in (1, 8, 64, 512)),
    _case("f21-helper-key", _rows(4, 4, 6, 8), "a key of −1e5 leaves FP16's range when it is cached: finite stored as"
          " infinite fails the recipe, whatever the kernel does then; a wider cache gives it weight 0",
          draw=_edited(("k", None, [0], [0, 1], "set", -1e5), ("q", None, None, [0], "set", 4.0)),
          recipes=("bf16", "fp16")),
    _case("f22-133120", _rows(4, 4, 3, 64), "q and k of about 133120 and V near it: raw scores of 1.1e12 fit FP32 and"
          " no narrower format. The scale is given, or their rounding would outweigh what they say",
          AttentionSpec(scale=2.0**-40),
          draw=_edited(("v", None, None, None, "times", 133120.0), q=133120.0, k=133120.0)),
    _case("f22-one-key", _rows(4, 4, 1, 64), "q = k = 133120 under the default scale, one key: the output is V whatever"
          " the score's rounding", draw=_edited(("qk", None, None, None, "set", 133120.0),
                                            ("v", None, None, None, "times", 133120.0))),
    _case("f23-low-logits", _rows(4, 4, 2), "two logits near −30000: the weights depend on their difference alone; a"
          " max that starts at 0 or −1e4 leaves 0/0", draw=Draw("deep_negative", {"depth": 30000.0}), recipes=_FP32),
    _case("f27-fp16-2049", _rows(4, 4, 2049), "2048 and 2048 ones: FP16 stops at 2048, which stays where it is when 1"
          " is added", draw=_edited(("v", None, None, None, "times", 0.01), ("v", None, None, None, "add", 1.0),
                                 ("v", None, [0], None, "set", 2048.0), q=0.05, k=0.05), recipes=_FP16),
    _case("f27-bf16-257", _rows(4, 4, 257), "256 and 256 ones: BF16 stops at 256",
          draw=_edited(("v", None, None, None, "times", 0.01), ("v", None, None, None, "add", 1.0),
                       ("v", None, [0], None, "set", 256.0), q=0.05, k=0.05)),
    _case("f28-fp32-tiny", _rows(4, 8), "V near 2^-130, subnormal in FP32: kept unless flushing is declared",
          draw=Draw("normal", {"v": 2.0**-130}), recipes=_FP32),
    _case("f28-bf16-tiny", _rows(4, 8), "V near 2^-128: BF16 has FP32's exponents and its subnormals",
          draw=Draw("normal",
          {"v": 2.0**-128})),
    _case("f28-fp16-tiny", _rows(4, 8), "V near 3e-5, subnormal in FP16: kept", draw=Draw("normal", {"v": 3e-5}),
          recipes=_FP16),
    _case("f29-position-15962", _rows(4, 16, head_dim=64), "RoPE at positions from 15962 on, angles in FP64: BF16 holds"
          " such positions to 64, and q·k depends on differences of 1", _CAUSAL, draw=Draw("rope", {"start": 15962})),
]  # fmt: skip

_PRECISIONS = [
    _case("f24-n512", _rows(4, 256, 512, 64), "BF16 intermediates show against FP64 of the same BF16 inputs: a kernel"
          " is half an output ulp away"),
    _case("f25-same-dtype", _rows(4, 128, 256, 64), "kernel and eager chain are both measured against FP64: a kernel"
          " that differs from the chain is not to blame", recipes=("fp16",)),
    _case("f30-table", _rows(4, 137, head_dim=32), "causality by a table of booleans: the same bits as by the rule",
          recipes=_FP32, mask=Draw("packed", {"lengths": [137]})),
    _case("f30-formula", _rows(4, 137, head_dim=32), "causality by the rule: the same bits as by a table",
          _CAUSAL, recipes=_FP32),
    _case("f58-values-30", _rows(4, 128, head_dim=64), "values up to 30 in BF16, whose half ulp is 0.06: a fixed"
          " tolerance of 0.06 fails right runs and passes wrong ones", draw=Draw("normal", {"q": 4.0, "v": 8.0})),
    _case("f60-nan-in-v", _rows(4, 24), "a visible NaN: the rows that see it are NaN, and no tolerance is asked before"
          " that is compared", _CAUSAL, draw=_edited(("v", [0], [12], [3], "set", "nan"))),
    _case("f60-no-nan", _rows(4, 24), "no NaN: one in the output is a mismatch", _CAUSAL),
    _case("f61-n1024", _rows(1, 32, 1024, 128), "normals of 0.25: the output is so small that a tolerance of 0.5 passes"
          " anything. INT8 scores are out of scope: FP16 and FP8 here",
          draw=Draw("normal", {"q": 0.25, "k": 0.25, "v": 0.25}), recipes=("fp16", "fp8_e4m3")),
    _case("f63-same-code", _rows(2, 64, head_dim=64), "the same code twice gives the same numbers: timings differ, and"
          " the gate does not ask them", _CAUSAL, recipes=_FP32),
]  # fmt: skip

_SHAPES = [
    *(_case(f"f31-gqa-{h}-{g}", _rows(h, 8, kv_heads=g), f"{h} query heads over {g} kv heads: repeated, not tiled")
      for h, g in ((4, 2), (28, 4), (12, 12))),
    _case("f32-d40", _rows(4, 16, head_dim=40), "the scale comes from the 40 channels there are"),
    _case("f32-d40-in-64", _rows(4, 16, head_dim=64), "40 channels in 64, zeros behind: the scale is given, the padded"
          " width says nothing", AttentionSpec(scale=40**-0.5), draw=_edited(("qk", None, None, list(range(40, 64)),
          "set", 0.0))),
    *(_case(f"f33-e{e}", _rows(4, 16, head_dim=32, value_dim=e), f"V is {e} wide, q and k 32: so is the output, and the"
            " scale comes from 32") for e in (24, 64)),
    *(_case(f"f34-d{d}", _rows(2, 33, head_dim=d), f"head_dim {d}: all columns count") for d in (63, 72, 96, 128)),
    *(_case(f"f35-n{n}", _rows(4, 16, n, 32), f"{n} keys in blocks of 64: the tail is no block")
      for n in (137, 12, 9)),
    _case("f37-no-width", _rows(8, 1, 9, 0, value_dim=4), "D = 0: every score is 0, the output is the mean of V"),
    _case("f41-last-keys", _rows(2, 3, 65600), "keys past 65536 alone are visible: a 16-bit index reads others,"
          " plausible ones. The entry's 2^31 elements need more memory than a test has",
          mask=Draw("keys", {"visible": list(range(-8, 0))})),
]  # fmt: skip

_CACHES = [
    _case("f43-empty-splits", _rows(4, 4, 64), "only keys 0 to 19 are visible, to row 2 none: splits without a key"
          " weigh nothing, and a row without any is 0 with lse −∞", recipes=_FP32, relations=True,
          mask=Draw("values", {"values": [[i != 2 and j < 20 for j in range(64)] for i in range(4)]})),
    _case("f45-sink", _rows(4, 24), "a sink of each head joins the denominator once, Z / (Z + e^sink); zeros would hide"
          " its loss", draw=_edited(("v", None, None, None, "add", 1.0)), relations=True,
          sinks=Draw("values", {"values": [0.0, 5.0, 1.0, 3.0]})),
    *(_case(f"f46-alibi-{h}", _rows(h, 4, 12), f"{h} heads: the slopes of the power of two below, then every other one"
            " of the next", recipes=_FP32, bias=Draw("alibi", {"format": "fp32"})) for h in (6, 12, 40)),
    _case("f47-pages-of-4", _rows(8, 1, 9), "9 tokens in pages of 4: no unwritten slot and no stale entry is read",
          _CAUSAL, relations=True),
    _case("f47-pages-of-16", _rows(4, 8, 41, 32), "41 tokens in pages of 16", _CAUSAL, relations=True),
    _case("f48-last-rows", _rows(8, 4, 384, 64), "a decode step and the prefill's last row are each near FP64; that"
          " their bits agree is another claim", _CAUSAL, relations=True),
    *(_case(f"f49-hot-key-n{n}", _rows(2, 4, n, 64), "key 96 is hot: P in FP8 is rounded against the block's own max,"
            " so the value depends on where blocks end; within FP8's rounding it is right",
            _CAUSAL, Draw("heavy_key", {"shift": 1.0, "key": 96 if n > 96 else n - 1}), recipes=_FP8, relations=True)
      for n in (88, 97, 139)),
    _case("f50-batch", _rows(2, 64, head_dim=64, batch=8), "a row alone, among 64, in a batch of 8: the same bits if"
          " claimed, else within rounding", _CAUSAL, relations=True),
]  # fmt: skip

_ODD = [("v", None, [0], [0], "set", 448.0), ("v", None, [0], [1], "set", 464.0), ("v", None, [0], [2], "set", 465.0),
        ("v", None, [0], [3], "set", 1000.0), ("v", None, [0], [4], "set", -1000.0)]  # fmt: skip
_UNIT = ("fp8_e4m3_unscaled",)
_EIGHT = [
    _case("f51-past-464", _rows(4, 8), "V holds 448, 464, 465 and ±1000 without a scale: they saturate by the declared"
          " rule, and are counted; elsewhere they are NaN", draw=_edited(*_ODD), recipes=_UNIT),
    _case("f53-zero-head", _rows(4, 16, head_dim=16), "V of head 1 is all zeros: its scale is 1, and no 0/0 arises. The"
          " entry has a channel; scales here are per head",
          draw=_edited(("v", [1], None, None, "set", 0.0)), recipes=_FP8),
    _case("f54-k-900", _rows(4, 32, head_dim=32), "channel 0 of K reaches 900: past E4M3's 448 without a scale",
          draw=_edited(("k", None, None, [0], "times", 300.0), ("q", None, None, [0], "times", 0.003)),
          recipes=("fp8_e4m3", "fp8_e4m3_unscaled")),
    _case("f54-k-tiny", _rows(4, 32, head_dim=32), "K of 1e-3 under q of 1e3: at E4M3's smallest number, unscaled",
          draw=Draw("normal", {"k": 1e-3, "q": 1e3}), recipes=("fp8_e4m3",)),
    _case("f55-head-scales", _rows(2, 32, head_dim=32), "K of head 1 is 20 times, q a twentieth: scales per head, none"
          " of them 1", draw=_edited(("k", [1], None, None, "times", 20.0), ("q", [1], None, None, "times", 0.05)),
          recipes=_FP8),
    _case("f57-stale-max", _rows(8, 1, 4, 1, value_dim=64), "logits 0, −1, −3, −5 in base 2: 0.6038 on key 0. P × 4096,"
          " from a max that is 12 octaves old, clamps at 448 in E4M3",
          AttentionSpec(scale=0.6931471805599453), recipes=_FP8,
          draw=_edited(("q", None, None, None, "set", 1.0), *(("k", None, [j], None, "set", -x) for j, x in
                       enumerate((0.0, 1.0, 3.0, 5.0))))),
    *(_case(f"f62-n{n}", _rows(2, 32, n, 64), f"FP8 at {n} keys, with amax and with unit scales: measured, not guessed",
            recipes=("fp8_e4m3", "fp8_e4m3_unscaled", "fp8_kv")) for n in (64, 512)),
    _case("f62-heavy-n512", _rows(2, 32, 512, 64), "a heavy first key: P of the others lies where E4M3 flushes unless"
          " it is scaled", draw=Draw("heavy_key", {"shift": 1.0}), recipes=_FP8),
]  # fmt: skip

# Known faults are no sample of what a run is for: they run where this file is named.
CASES: list[Case] = []
MORE = [*_MASKS, *_RANGES, *_PRECISIONS, *_SHAPES, *_CACHES, *_EIGHT]
