"""`pytest` here, once the package and its extra `test` are installed: the fixture comes with attention-harness."""

import pytest
import torch
from my_attention import attention as kernel

from harness import AttentionSpec


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_as_accurate_as_its_precision_allows(attention, dtype, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 128, 64, generator=generator).to(dtype) for _ in range(3))
    out = kernel(q, k, v, causal=causal, scale=0.125)
    recipe = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    attention.assert_close(out, q, k, v, spec=AttentionSpec(causal=causal), recipe=recipe)
