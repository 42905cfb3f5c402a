"""torch's scaled_dot_product_attention with one of its backends forced.

`is_causal` is top-left: bottom-right causality of unequal lengths, windows, lengths and masks go in as `attn_mask`.
Two places where this is not the chain that its recipe describes, both to the kernel's advantage: math casts 16-bit
inputs to FP32 and keeps P there, and flash on CPU takes 512 keys a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness.arithmetic import DTYPES
from harness.kernels.black_box import BlackBox, Call
from harness.kernels.seen import Seen
from harness.kernels.visibility import additive, visible
from harness.records import Ran
from harness.result import Refusal, Result
from harness.spec import AttentionSpec, Shape

_NATIVE = ("fp64", "fp32", "bf16", "fp16")
# The operator whose presence shows that a backend ran; `math` has none of its own.
_FUSED = {
    SDPBackend.MATH: "_safe_softmax",
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@dataclass(frozen=True)
class Sdpa(BlackBox):
    """One backend."""

    backend: SDPBackend = SDPBackend.MATH

    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        why = []
        if spec.softcap is not None:
            why.append("SDPA has no softcap")
        if "sinks" in extras:
            why.append("SDPA has no sinks, and gives no lse to merge them by")
        if spec.empty_row == "nan":
            why.append("SDPA gives 0 for a row that sees no key, never NaN")
        if self.backend is SDPBackend.FLASH_ATTENTION and shape.head_dim != shape.E:
            why.append("SDPA's flash kernel needs v as wide as q and k")
        return tuple(why)

    def call(self, call: Call) -> Result:
        bare = self.bare(call)
        with _refusing(self.name), Seen() as seen:
            out = bare()
        return Result(out, ran=self._proof(seen.ran(f"SDPA {self.backend.name}"), call))

    def bare(self, call: Call) -> Callable[[], Tensor]:
        mask, causal = _rules(call)
        shape, spec = call.shape, call.spec

        def run() -> Tensor:
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(
                    call.q.codes, call.k.codes, call.v.codes, attn_mask=mask, is_causal=causal,
                    scale=spec.scale if shape.head_dim else spec.scale_for(0), enable_gqa=shape.group > 1,
                )  # fmt: skip

        return run

    def _proof(self, ran: Ran, call: Call) -> Ran:
        """Raises RuntimeError when something else ran than was asked for."""
        fused = [o for o in ran.operators if o.startswith("_scaled_dot_product")]
        wanted = _FUSED[self.backend]
        right = all(o.startswith(wanted) for o in fused) and any(o.startswith(wanted) for o in ran.operators)
        if call.q.codes.numel() and call.shape.S and not right:
            raise RuntimeError(
                f"{self.name} was asked for, but torch ran {', '.join(ran.operators) or 'nothing'}"
            )
        return ran


def _rules(call: Call) -> tuple[Tensor | None, bool]:
    """`attn_mask` and `is_causal` for these rules."""
    spec, shape, extras = call.spec, call.shape, call.extras
    square = spec.align == "top-left" or shape.q_len == shape.S
    if spec.causal and spec.left is None and square and not extras.given:
        return None, True
    seen = visible(spec, shape, extras, call.device)
    if extras.bias is not None:
        base = DTYPES[call.recipe.base]
        seen = additive(extras.bias, seen, (call.q.codes.dtype, base))
    if seen is None:
        return None, False
    return seen.expand(shape.batch, shape.heads, shape.q_len, shape.S), False


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """torch's own refusal of a forced backend, with the reasons it gives as warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            reasons = [str(w.message).partition(" (Triggered")[0] for w in said]
            raise Refusal(f"torch has no kernel for {name} here: {' '.join(reasons)}") from None


SDPA_MATH = Sdpa("sdpa_math", _NATIVE, backend=SDPBackend.MATH)
SDPA_FLASH = Sdpa("sdpa_flash", _NATIVE, backend=SDPBackend.FLASH_ATTENTION)
SDPA_EFFICIENT = Sdpa("sdpa_efficient", _NATIVE[1:], cuda_only=True, backend=SDPBackend.EFFICIENT_ATTENTION)
SDPA_CUDNN = Sdpa("sdpa_cudnn", _NATIVE[2:], cuda_only=True, backend=SDPBackend.CUDNN_ATTENTION)
