"""The group of commands. A command's module is imported when it is asked for: `cost` pays for no other."""

from __future__ import annotations

from importlib import import_module

import click

from harness import __version__
from harness.cli.exits import USAGE

WIDTH = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
MODULES = {
    "compare": "harness.cli.comparing",
    "cost": "harness.cli.costing",
    "review": "harness.cli.reviewing",
    "gate": "harness.cli.gating",
    "evidence": "harness.cli.evidence",
    **dict.fromkeys(("explain", "judge", "tolerance"), "harness.cli.doors"),
}
OTHERS = "harness.cli.commands"


class _Commands(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        import_module(MODULES.get(cmd_name, OTHERS))
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        for module in (OTHERS, *dict.fromkeys(MODULES.values())):
            import_module(module)
        return super().list_commands(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"unknown command {args[0]!r}; allowed: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings=WIDTH, invoke_without_command=True)
@click.version_option(__version__, prog_name="attention-harness")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """How accurate is attention in FP32, BF16, FP16 and FP8, measured against an FP64 ground truth?"""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(USAGE)
