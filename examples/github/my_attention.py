import torch


def attention(q, k, v, *, causal=False, scale=None):
    """Softmax attention in FP32, the output in the inputs' type."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).to(q.dtype)
