"""How others decide pass or fail: their published rules in our words, each with its source.

`accepts(out, field)` is True, False, or None where the project has no rule for this precision. A `Field` holds the
references they compare with: `golden` FP64 of the stored inputs, `lp` torch's own operators in the dtype under test
(BF16 for FP8), `reordered` the same with K scaled first, `unquantised` those on the inputs before they were stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.mutants.calls import Call
from harness.truth import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.bfloat16}


class Field:
    """References of one call, made when a rule asks for them."""

    def __init__(self, call: Call) -> None:
        self.call, self.recipe = call, call.recipe.name
        self.dtype = DTYPES[self.recipe]
        self.softcapped = call.spec.softcap is not None

    @cached_property
    def golden(self) -> Tensor:
        return reference(*self.call.values, self.call.spec, **self.call.extras.as_options()).out

    @cached_property
    def exact(self) -> Tensor:
        return reference(*self.call.exact, self.call.spec, **self.call.extras.as_options()).out

    @cached_property
    def lp(self) -> Tensor:
        return eager(self.call, self.call.values, self.dtype)

    @cached_property
    def reordered(self) -> Tensor:
        p = torch.float8_e4m3fn if self.recipe == "fp8_e4m3" else None
        return eager(self.call, self.call.values, self.dtype, reordered=True, p=p)

    @cached_property
    def unquantised(self) -> Tensor:
        return eager(self.call, self.call.exact, self.dtype)


def eager(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, reordered: bool = False,
    p: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention by torch's operators, each storing in `dtype`; FP64 out."""
    q, k, v = (x.to(dtype) for x in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = call.spec.scale_for(q.shape[3])
    s = q @ (k * scale).mT if reordered else (q @ k.mT) * scale
    cap, extras = call.spec.softcap, call.extras
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if extras.bias is None else s + extras.bias.to(dtype)
    s = s.masked_fill(~shown(call), -math.inf)
    if extras.sinks is not None:
        s = torch.cat([s, extras.sinks.to(dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    w = torch.softmax(s, -1).to(dtype)
    w = w if extras.sinks is None else w[..., :-1]
    w = w if p is None else w.to(p).to(dtype)
    return (w @ v).double()


def shown(call: Call) -> Tensor:
    """Which keys each row sees, from the rules' definition, `[B|1, H|1, L, S]`."""
    rows, keys = call.exact[0].shape[2], call.exact[1].shape[2]
    lens = call.extras.kv_lens
    n = (torch.tensor([keys]) if lens is None else lens).view(-1, 1, 1, 1)
    i, j = torch.arange(rows).view(-1, 1), torch.arange(keys)
    at = i + (n - rows if call.spec.align == "bottom-right" else 0)
    seen = (j < n) & (j <= at if call.spec.causal else j >= 0)
    left, right = call.spec.window or (None, None)
    seen = seen if left is None else seen & (j >= at - left)
    seen = seen if right is None else seen & (j <= at + right)
    return seen if call.extras.mask is None else seen & call.extras.mask


@dataclass(frozen=True)
class Rule:
    name: str
    what: str
    source: str
    accepts: Callable[[Tensor, Field], bool | None]


def close(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    """|a − b| ≤ atol + rtol·|b| everywhere. A NaN on either side is a difference."""
    return bool(((a - b).abs() <= atol + rtol * b.abs()).all())


def _worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def flash_attention(out: Tensor, f: Field) -> bool | None:
    if f.recipe == "fp32":
        return None
    ref = f.golden.float().to(f.dtype)
    spacing = _worst((ref + 0.3 - 0.3).double(), ref.double())
    factor = 3.0 if f.softcapped else 2.0
    return _worst(out, ref.double()) <= factor * _worst(f.reordered, ref.double()) + 2 * spacing


def check_equal(out: Tensor, f: Field) -> bool | None:
    if f.recipe == "fp8_e4m3":
        return None
    golden = f.golden if f.recipe == "fp32" else f.golden.float().double()
    return _worst(out, golden) <= max(1e-5, FUDGE * _worst(f.lp, golden))


FUDGE = 4.0  # the tests' own go from 1 to 670, mostly 1.1 to 10


def assert_close(out: Tensor, f: Field) -> bool | None:
    rtol = {torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}[f.dtype]
    return close(out, f.golden.float().to(f.dtype).double(), rtol, 1e-5)


def tritonbench(out: Tensor, f: Field) -> bool | None:
    rtol, atol = {"fp32": (1e-5, 1e-8), "fp8_e4m3": (0.2, 2.0)}.get(f.recipe, (1e-2, 2e-2))
    return close(out, f.lp, rtol, atol)


def flashinfer_bench(out: Tensor, f: Field) -> bool | None:
    if not bool(torch.isfinite(out).all()):
        return False
    error, golden = (out - f.golden).abs(), f.golden.abs()
    beyond = (error > 1e-2) & (error / (golden + 1e-8) > 1e-2)
    return float(beyond.double().mean()) <= (0.05 if f.recipe == "fp8_e4m3" else 0.0)


def transformer_engine(out: Tensor, f: Field) -> bool | None:
    if f.recipe == "fp32":
        return None
    if f.recipe == "fp8_e4m3":
        other = f.unquantised
        span = max(float(out.max()), float(other.max())) - min(float(out.min()), float(other.min()))
        return float((out - other).square().mean().sqrt()) < 0.11 * span
    tolerance = 1.5e-2 if f.recipe == "bf16" else 1e-3
    return close(out, f.lp, tolerance, tolerance)


def vllm(out: Tensor, f: Field) -> bool | None:
    if f.recipe == "fp32":
        return None
    return (
        close(out, f.unquantised, 1.5e-1, 1.5e-1)
        if f.recipe == "fp8_e4m3"
        else close(out, f.lp, 1e-2, 1.5e-2)
    )


def kernelbench(out: Tensor, f: Field) -> bool | None:
    if f.recipe == "fp8_e4m3":
        return None
    tolerance = 1e-4 if f.recipe == "fp32" else 1e-2
    return close(out, f.lp, tolerance, tolerance)


def cosine(out: Tensor, f: Field) -> bool | None:
    return float(torch.nn.functional.cosine_similarity(out.flatten(), f.exact.flatten(), 0)) > 0.999


def torchtitan(out: Tensor, f: Field) -> bool | None:
    floor = _worst(f.golden.to(f.dtype).double(), f.golden)
    error = _worst(f.reordered if f.recipe == "fp8_e4m3" else f.lp, f.golden)
    if error / max(float(f.golden.abs().max()), floor) > 0.1:
        return True  # inconclusive: nothing is said against it
    return _worst(out, f.golden) <= 2 * error + floor


_GITHUB = "https://github.com"
RULES = (
    Rule("FlashAttention 2×", "max error ≤ 2 × that of torch in the same dtype (3 × with softcap), and two spacings",
         f"{_GITHUB}/Dao-AILab/flash-attention/blob/main/hopper/test_flash_attn.py", flash_attention),
    Rule("torch _check_equal", f"max error ≤ {FUDGE:g} × that of the same dtype's math, at least 1e-5",
         f"{_GITHUB}/pytorch/pytorch/blob/main/test/test_transformers.py", check_equal),
    Rule("assert_close", "rtol 1.3e-6, 1.6e-2, 1e-3 (FP32, BF16, FP16), atol 1e-5, against FP64 rounded",
         "https://docs.pytorch.org/docs/stable/testing.html", assert_close),
    Rule("tritonbench", "rtol 1e-2, atol 2e-2 against the same dtype (FP32 1e-5, 1e-8; FP8 0.2, 2.0)",
         f"{_GITHUB}/meta-pytorch/tritonbench/tree/main/tritonbench/operators", tritonbench),
    Rule("flashinfer-bench", "no element off by 1e-2 absolute and 1e-2 relative (FP8: 5 % may be)",
         f"{_GITHUB}/flashinfer-ai/flashinfer-bench/blob/main/flashinfer_bench/bench/utils.py", flashinfer_bench),
    Rule("TransformerEngine", "rtol = atol = 1.5e-2, FP16 1e-3, against 16 bits; FP8: RMSE < 0.11 × the range",
         f"{_GITHUB}/NVIDIA/TransformerEngine/blob/main/tests/pytorch/attention/test_attention.py", transformer_engine),
    Rule("vLLM", "rtol 1e-2, atol 1.5e-2 against the same dtype; FP8 0.15 against unquantised",
         f"{_GITHUB}/vllm-project/vllm/blob/main/tests/kernels/attention/test_flash_attn.py", vllm),
    Rule("KernelBench", "rtol = atol = 1e-2 (FP32 1e-4) against the same dtype",
         f"{_GITHUB}/ScalingIntelligence/KernelBench/blob/main/src/kernelbench/eval.py", kernelbench),
    Rule("cosine > 0.999", "cosine similarity with unquantised FP64", "folklore", cosine),
    Rule("torchtitan", "max error ≤ 2 × that of the same dtype and a rounding; says nothing where that is over 10 %",
         f"{_GITHUB}/pytorch/torchtitan/blob/main/.claude/skills/kernel-numerics-verifier/SKILL.md", torchtitan),
)  # fmt: skip


def verdicts(out: Tensor, field: Field) -> dict[str, bool | None]:
    """By rule: True where it accepts, None where it has nothing to say."""
    return {r.name: r.accepts(out.double(), field) for r in RULES}
