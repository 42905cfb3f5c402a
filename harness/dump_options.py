"""The rules of a call as text: from a file's metadata, or a command line."""

from __future__ import annotations

from collections.abc import Mapping

from harness.spec import AttentionSpec

SPEC = ("causal", "align", "window", "scale", "softcap", "empty_row")


def spec_of(options: Mapping[str, str]) -> AttentionSpec:
    """The rules that options given as text name. Raises ValueError for a text that is none of what is allowed."""
    values: dict[str, object] = {name: options[name] for name in ("align", "empty_row") if name in options}
    values |= {name: _number(name, options[name]) for name in ("scale", "softcap") if name in options}
    if "causal" in options:
        values["causal"] = _truth_value("causal", options["causal"])
    if "window" in options:
        values["window"] = _window(options["window"])
    return AttentionSpec(**values)  # type: ignore[arg-type]


def _truth_value(name: str, text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.strip().lower() not in known:
        raise ValueError(f"{name} is {text!r}; allowed: true, false")
    return known[text.strip().lower()]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; allowed: a finite number") from None


def _window(text: str) -> tuple[int | None, int | None]:
    parts = [p.strip().lower() for p in text.strip("()[]").split(",")]
    if len(parts) != 2 or not all(p == "none" or p.isdecimal() for p in parts):
        raise ValueError(
            f"window is {text!r}; allowed: left,right, each an integer ≥ 0 or none, such as 127,0"
        )
    left, right = (None if p == "none" else int(p) for p in parts)
    return left, right
