"""A call that was judged in Python, kept: as a record, and as a file that `python -m harness judge` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.docket import Judgement
from harness.dump import Dump
from harness.files import write_bytes_atomically
from harness.judge_file import FileVerdict, record_of
from harness.operands import check
from harness.quantize import store
from harness.recipe import TENSORS, get_recipe
from harness.records import to_json
from harness.spec import AttentionSpec

_EXTRAS = ("mask", "bias", "sinks", "kv_lens")


def record_line(name: str, call: Mapping[str, Any], judgement: Judgement) -> str:
    """One record as JSON; `call` holds q, k, v, out and the options of `harness.judge`."""
    spec, recipe = call.get("spec") or AttentionSpec(), get_recipe(call.get("recipe", "bf16"))
    q, k, v = (call[n] for n in TENSORS)
    shape, extras = check(q, k, v, spec, **{n: call.get(n) for n in _EXTRAS})
    dump = Dump(
        q,
        k,
        v,
        call["out"],
        (None, None, None),
        call.get("lse"),
        extras.to("cpu"),
        None,
        spec,
        recipe.name,
        "test",
    )
    found = FileVerdict(shape, judgement, (), (), float("nan"), 0)
    record = record_of(Path(name), dump, recipe, found)
    return to_json(
        replace(record, case=f"test/{_plain(name)}", group="test", why=f"judged in {name}", source=name)
    )


def keep(folder: Path, name: str, call: Mapping[str, Any]) -> Path:
    """Write the tensors and rules of a call as `folder/NAME.safetensors`, whole or not at all, and give its path."""
    from safetensors.torch import save

    tensors = {n: call[n] for n in (*TENSORS, "out", "lse", *_EXTRAS) if call.get(n) is not None}
    if call.get("scales") is not None and not call.get("quantize"):  # a file holds codes, a call their values
        stored = store(
            tuple(call[n] for n in TENSORS), get_recipe(call.get("recipe", "bf16")), call["scales"]
        )
        tensors |= {n: x.codes.float() for n, x in zip(TENSORS, stored, strict=True)}
        tensors |= {
            f"{n}_scale": x.scale.float() for n, x in zip(TENSORS, stored, strict=True) if x.scale is not None
        }
    for n, x in zip(TENSORS, call.get("exact") or (None, None, None), strict=True):
        if x is not None:
            tensors[f"exact_{n}"] = x
    whole = {n: torch.as_tensor(x).detach().cpu().clone().contiguous() for n, x in tensors.items()}
    path = folder / f"{_plain(name)}.safetensors"
    write_bytes_atomically(path, save(whole, _rules(call)))
    return path


def _rules(call: Mapping[str, Any]) -> dict[str, str]:
    """The rules as a file's metadata."""
    spec, recipe = call.get("spec") or AttentionSpec(), get_recipe(call.get("recipe", "bf16"))
    found = {
        "causal": str(spec.causal).lower(),
        "align": spec.align,
        "empty_row": spec.empty_row,
        "recipe": recipe.name,
    }
    if spec.window is not None:
        found["window"] = ",".join("none" if side is None else str(side) for side in spec.window)
    found |= {n: repr(float(x)) for n in ("scale", "softcap") if (x := getattr(spec, n)) is not None}
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", name).strip("-")[:150] or "unnamed"
