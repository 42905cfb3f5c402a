"""`cost`: FLOPs, bytes and times from sizes alone. Nothing is measured, and neither torch nor numpy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.group import cli
from harness.cli.paths import FILE


@cli.command(short_help="What a model's prefill and decode step cost, by format.")
@click.option("--model", metavar="NAME", help="A model of --list.")
@click.option("--context", metavar="TOKENS", help="Such as 4096, 128K, 1M.  [default: 4K]")
@click.option("--batch", type=click.IntRange(1), help="Sequences.  [default: 1]")
@click.option(
    "--kv",
    metavar="NAME",
    multiple=True,
    help="How K and V are stored: recipes, with their scales, or formats.  [default: bf16, fp8_e4m3, mxfp8]",
)
@click.option("--weights", metavar="FORMAT", help="Format of the weights.  [default: bf16]")
@click.option("--bandwidth", metavar="RATE", help="Of memory, such as 4.8TB/s.")
@click.option("--flops", metavar="RATE", help="Of matrix products, such as 989TFLOP/s.")
@click.option("--config", type=FILE, help="A TOML file; options win over it.")
@click.option(
    "--list", "listed", is_flag=True, help="Show the named models and where their shapes are printed."
)
def cost(config: Path | None, listed: bool, kv: tuple[str, ...], **given: Any) -> None:
    """FLOPs, bytes and times of a model's prefill and decode step, from sizes alone.

    The TOML file of --config has the keys model (a name, or a table with width, layers, heads, ffn and, where they
    differ, name, kv_heads, head_dim, ffn_matrices, vocab, tied, qkv_bias, qk_norm, source), context, batch, kv,
    weights, bandwidth and flops.
    """
    from harness.cost.settings import read_config, settings
    from harness.cost.tables import model_list, to_text

    if listed:
        click.echo(model_list(), nl=False)
        return
    chosen = {} if config is None else read_config(config)
    chosen.update({name: value for name, value in given.items() if value is not None})
    names = [name.strip() for value in kv for name in value.split(",")]
    click.echo(to_text(settings({**chosen, **({"kv": names} if kv else {})})), nl=False)
