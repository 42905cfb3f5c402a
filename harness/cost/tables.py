"""The tables of a cost, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from harness.cost.models import MODELS, Model
from harness.cost.phases import Work, decode_step, prefill
from harness.cost.roofline import Rates
from harness.cost.settings import Settings
from harness.cost.units import (
    show_bytes,
    show_count,
    show_flops,
    show_rate,
    show_ratio,
    show_time,
    show_tokens,
)

Column = tuple[str, Callable[[Work], str]]
TOLD = """\
Bytes count once: weights, K and V, and what matrix products read and write of activations. A time
is the longer of bytes ÷ bandwidth and FLOPs ÷ rate: no kernel is faster. att.: FLOP/B of Q·Kᵀ and
P·V over K and V alone, which a batch does not raise."""


def to_text(asked: Settings) -> str:
    """Everything that was asked for. Ends with a newline."""
    tokens = show_tokens(asked.context)
    whole, step = (
        [make(asked.model, kv, asked.weights, asked.context, asked.batch) for kv in asked.kv]
        for make in (prefill, decode_step)
    )
    sections = [
        _head(asked),
        f"== FLOPs ==\n{_flops(asked.model, whole[0], step[0])}",
        f"== Prefill of {tokens} tokens, causal; weights {show_bytes(whole[0].weights)} ==\n"
        + _by_format(asked, whole, _prefill_columns(asked.rates)),
        f"== Decode, one step over {tokens} keys; weights {show_bytes(step[0].weights)} ==\n"
        + _by_format(asked, step, _decode_columns(asked.rates)),
        TOLD,
    ]
    return "\n\n".join(sections) + "\n"


def model_list() -> str:
    """The named models, and where each shape is printed. Ends with a newline."""
    headers = ["model", "D", "layers", "heads", "FFN", "vocabulary", "parameters"]
    rows = [
        [
            m.name, str(m.width), str(m.layers), _heads(m), f"{m.ffn_matrices}×{m.ffn}", str(m.vocab or ""),
            show_count(m.params),
        ]
        for m in MODELS.values()
    ]  # fmt: skip
    told = "heads: query heads / kv heads × head_dim. FFN: matrices × inner width; three have a gate."
    sources = _table(["model", "source"], [[m.name, m.source] for m in MODELS.values()], left=(0, 1))
    return f"{_table(headers, rows)}\n{told}\n\n{sources}\n"


def _head(asked: Settings) -> str:
    m, rates = asked.model, asked.rates
    size = f"{m.name}: D = {m.width}, {m.layers} layers, heads {_heads(m)}, FFN {m.ffn_matrices}×{m.ffn}"
    tables = f"vocabulary {m.vocab}, " if m.vocab else ""
    given = [f"{asked.context} tokens", f"batch {asked.batch}", f"weights {asked.weights.name}"]
    given += [show_rate(rates.bandwidth, "B/s")] if rates.bandwidth else []
    given += [show_rate(rates.flops, "FLOP/s")] if rates.flops else []
    lines = [size, f"{tables}{show_count(m.params)} parameters" + (f"; {m.source}" if m.source else "")]
    lines.append(", ".join(given))
    if rates.ridge is not None:
        lines.append(f"ridge: {show_ratio(rates.ridge)} FLOP/B; memory limits below it, compute above")
    return "\n".join(lines)


def _heads(m: Model) -> str:
    return f"{m.heads}/{m.K}×{m.H}"


def _flops(model: Model, whole: Work, step: Work) -> str:
    def row(name: str, part: Callable[[Work], int]) -> list[str]:
        shares = (f"{100 * part(w) / w.total_flops:.1f} %" for w in (whole, step))
        return [
            name,
            *(x for w, s in zip((whole, step), shares, strict=True) for x in (show_flops(part(w)), s)),
        ]

    rows = [row(name, lambda w, n=name: w.flops[n]) for name in whole.flops if whole.flops[name]]  # type: ignore[misc]
    rows.append(row("in all", lambda w: w.total_flops))
    ratios = [show_ratio(w.flops["attention"] / w.flops["ffn"]) for w in (whole, step)]
    equal = [show_ratio(n * model.parity) for n in (1, 2)]
    return (
        _table(["", "prefill", "", "decode step", ""], rows)
        + f"\nattention ÷ FFN: {ratios[0]} in the prefill, {ratios[1]} in the step. They are equal in a"
        + f"\nstep over {equal[0]} keys and in a causal prefill of about {equal[1]} tokens."
    )


def _prefill_columns(rates: Rates) -> list[Column]:
    columns: list[Column] = [
        ("activations", lambda w: show_bytes(w.activations)),
        ("moved", lambda w: show_bytes(w.moved)),
        ("FLOP/B", lambda w: show_ratio(w.intensity)),
    ]
    if rates.bandwidth is not None:
        columns.append(("memory", lambda w: _time(rates.memory_s(w.moved))))
    if rates.flops is not None:
        columns.append(("compute", lambda w: _time(rates.compute_s(w.total_flops))))
    return columns


def _decode_columns(rates: Rates) -> list[Column]:
    columns: list[Column] = [
        ("÷weights", lambda w: show_ratio(w.kv_read / w.weights)),
        ("moved", lambda w: show_bytes(w.moved)),
        ("att.", lambda w: show_ratio(w.attention_intensity)),
        ("FLOP/B", lambda w: show_ratio(w.intensity)),
    ]
    if rates.bandwidth is not None or rates.flops is not None:
        columns.append(("time", lambda w: _time(rates.time_s(w.total_flops, w.moved))))
    return columns


def _by_format(asked: Settings, works: Sequence[Work], columns: Sequence[Column]) -> str:
    cached, rates = asked.batch * asked.context, asked.rates
    shown: list[Column] = [
        ("KV/token", lambda w: show_bytes(w.kv_cache / cached)),
        ("KV in all", lambda w: show_bytes(w.kv_cache)),
        *columns,
    ]
    if rates.ridge is not None:
        shown.append(("limit", lambda w: rates.side(w.total_flops, w.moved) or ""))
    rows = [[kv.name, *(show(w) for _, show in shown)] for kv, w in zip(asked.kv, works, strict=True)]
    return _table(["", *(name for name, _ in shown)], rows)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else show_time(seconds)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Aligned columns two apart. (To load tabulate takes a quarter of the time that this command may.)"""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * w for w in widths])

    def shown(line: Sequence[str]) -> str:
        cells = (
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(shown, lines))
