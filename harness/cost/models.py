"""Shapes of dense decoders: what a model's own description says, the rest derived.

`MODELS` holds public ones, each with where its shape is printed. Not here: mixtures of experts, whose decode step reads
what the router chose, latent attention (MLA), and models whose layers are not alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.cost.formulas import projections
from harness.spec import Shape

LIMIT = 2**31  # of a size: what follows from sizes stays well inside a double


@dataclass(frozen=True)
class Model:
    """A decoder of `layers` equal layers: attention with W_Q, W_K, W_V, W_O, and an FFN of `ffn_matrices` products
    between `width` and `ffn` (3: one of them a gate). `kv_heads` None is `heads`, `head_dim` None is width / heads.

    `vocab` 0 leaves embedding and head out. `tied`: they are one matrix. `qkv_bias`, `qk_norm`: vectors that only the
    count of parameters sees. Raises ValueError for a size that is none, and heads that do not divide.
    """

    name: str
    width: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn_matrices: int = 3
    vocab: int = 0
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name is {self.name!r}; allowed: a non-empty string")
        if not isinstance(self.source, str):
            raise ValueError(f"source is {self.source!r}; allowed: a string")
        for name in ("tied", "qkv_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: true, false")
        for name in ("width", "layers", "heads", "ffn", "kv_heads", "head_dim", "ffn_matrices", "vocab"):
            value, least = getattr(self, name), 0 if name == "vocab" else 1
            if value is None and name in ("kv_heads", "head_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LIMIT:
                raise ValueError(f"{name} is {value!r}; allowed: an integer ≥ {least}, below 2^31")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            if self.width % self.heads:
                raise ValueError(
                    f"width {self.width} over {self.heads} heads; allowed: a multiple of the heads, or a head_dim"
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        self.call()  # heads over kv heads

    @property
    def K(self) -> int:
        """kv heads."""
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def H(self) -> int:
        """head_dim."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def kv_width(self) -> int:
        """d_kv: values of K that one token of one layer has."""
        return self.K * self.H

    def call(self, batch: int = 1, q_len: int = 1, kv_len: int | None = None) -> Shape:
        """One layer's attention call."""
        return Shape(batch, self.heads, q_len, self.H, kv_heads=self.K, kv_len=kv_len)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, with its two norms of one vector each."""
        matrices = projections(1, 1, self.width, self.heads, self.K, self.H).values()
        vectors = 2 * self.width + 2 * self.H * self.qk_norm
        bias = (self.heads + 2 * self.K) * self.H * self.qkv_bias
        ffn = self.ffn_matrices * self.width * self.ffn
        return sum(m.params for m in matrices) + ffn + vectors + bias

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocab * self.width

    @property
    def params(self) -> int:
        """All parameters, with the last norm."""
        tables = self.embedding_params * (1 if self.tied else 2)
        return self.layers * self.layer_params + self.width + tables

    @property
    def parity(self) -> float:
        """Keys at which a token's full attention takes as many FLOPs as its FFN: 4·S·N·H = 2·matrices·D·F."""
        return self.ffn_matrices * self.width * self.ffn / (2 * self.heads * self.H)


def _llama(
    name: str,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    source: str,
    tied: bool = False,
) -> Model:
    return Model(name, width, layers, heads, ffn, kv_heads, vocab=vocab, tied=tied, source=source)


# What a row cites is the model's own config.json, but for Llama 3 (vocabulary: the tokenizer's 128,000 and 256).
_HUB, _LLAMA_3 = "huggingface.co/", "arXiv:2407.21783, table 3"
MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model(
            "plain-7b", 4096, 32, 32, 4 * 4096, ffn_matrices=2,
            source="no real model: the source notes' 7B, d = 4096, 32 layers, FFN 4d",
        ),
        _llama("llama-2-7b", 4096, 32, 32, 32, 11008, 32000, _HUB + "meta-llama/Llama-2-7b-hf"),
        _llama("llama-2-70b", 8192, 80, 64, 8, 28672, 32000, _HUB + "meta-llama/Llama-2-70b-hf"),
        _llama("llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256, _LLAMA_3),
        _llama("llama-3.1-70b", 8192, 80, 64, 8, 28672, 128256, _LLAMA_3),
        _llama("llama-3.1-405b", 16384, 126, 128, 8, 53248, 128256, _LLAMA_3),
        _llama("llama-3.2-1b", 2048, 16, 32, 8, 8192, 128256, _HUB + "meta-llama/Llama-3.2-1B", tied=True),
        _llama("mistral-7b-v0.3", 4096, 32, 32, 8, 14336, 32768, _HUB + "mistralai/Mistral-7B-v0.3"),
        Model(
            "qwen2.5-7b", 3584, 28, 28, 18944, 4, vocab=152064, qkv_bias=True, source=_HUB + "Qwen/Qwen2.5-7B"
        ),
        Model("qwen3-8b", 4096, 36, 32, 12288, 8, 128, vocab=151936, qk_norm=True, source=_HUB + "Qwen/Qwen3-8B"),
        Model("qwen3-32b", 5120, 64, 64, 25600, 8, 128, vocab=151936, qk_norm=True, source=_HUB + "Qwen/Qwen3-32B"),
        _llama("smollm2-135m", 576, 30, 9, 3, 1536, 49152, _HUB + "HuggingFaceTB/SmolLM2-135M", tied=True),
    )
}  # fmt: skip


def get_model(name: str) -> Model:
    """A model by name. Raises ValueError naming the valid ones."""
    try:
        return MODELS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(MODELS)}") from None
