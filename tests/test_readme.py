"""What the documents show is run: Python as it stands, commands by their names and options, recipes, and links."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import harness
from harness.cli.group import cli
from harness.recipe import load_recipe
from harness.records import Status

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str = "") -> list[str]:
    """Fenced blocks of a language."""
    return [
        body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language
    ]


def commands() -> list[tuple[str, str]]:
    """Every command line that a page shows, without its comment."""
    found = []
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(encoding="utf-8")):
            for line in block.splitlines():
                if re.match(r"\s*python (-m harness|noxfile\.py) ", line):
                    found.append((page, line.partition("#")[0].replace("…", "").strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda x: x[:60])
def test_commands_that_the_pages_show_exist_with_their_options(page: str, line: str) -> None:
    words = shlex.split(line)
    own = words[2:]
    if words[1] == "noxfile.py":
        if words[2] != "-s":
            return
        assert f"\ndef {words[3]}(session" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
        given = words[words.index("--") + 1 :] if "--" in words else []
        if words[3] != "accuracy" or not given:
            return
        own = ["run", *given]
    else:
        own = words[3:]
    if own[0].startswith("-"):
        return
    command = cli.get_command(click.Context(cli), own[0])
    assert command is not None, own[0]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    assert {w.partition("=")[0] for w in own[1:] if w.startswith("-")} <= known


def test_python_of_the_readme_runs_and_says_what_is_shown_below_it() -> None:
    pieces = re.findall(r"^```python\n(.*?)^```$\n\n(?:```\n(.*?)^```$)?", README, re.M | re.S)
    assert len(pieces) >= 2
    for code, shown in pieces:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, "README.md", "exec"), {})
        wanted = [
            re.split(r"[-+]?\d", line)[0].strip() for line in shown.splitlines()
        ]  # figures differ by ISA
        assert [w for w in wanted if w not in said.getvalue()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [t for t in targets if t and not t.startswith(("http:", "https:", "mailto:"))]
    assert [t for t in local if not ((ROOT / page).parent / t).exists()] == []


RECIPES = [
    (page, i)
    for page in PAGES
    for i, b in enumerate(blocks((ROOT / page).read_text(), "toml"))
    if "storage" in b
]


@pytest.mark.parametrize(("page", "number"), RECIPES)
def test_recipes_that_the_pages_show_load(page: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(blocks((ROOT / page).read_text(encoding="utf-8"), "toml")[number], encoding="utf-8")
    assert load_recipe(path).storage


def test_softmax_that_divides_before_it_rounds_passes_under_the_recipe_shown_for_it(tmp_path: Path) -> None:
    """What JAX does on the CPU in BF16: probabilities in FP32, rounded once they are divided, then P·V."""
    (text,) = [
        b for b in blocks((ROOT / "docs/doors.md").read_text(encoding="utf-8"), "toml") if "bf16_early" in b
    ]
    path = tmp_path / "bf16_early.toml"
    path.write_text(text, encoding="utf-8")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 32, generator=g).bfloat16() for _ in range(3))
    p = torch.softmax(q.float() @ k.float().mT * 32**-0.5, -1).bfloat16()
    out = (p.float() @ v.float()).bfloat16()
    options: dict[str, Any] = {"recipe": load_recipe(path)}
    assert harness.judge(out, q, k, v, **options).status is Status.PASS
