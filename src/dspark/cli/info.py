"""`dspark info`: versions, machine, models and drafters that were found."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("info", help="versions, machine, models found", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look around; nothing is loaded, converted or downloaded."""
    from dspark.cache import cache_directory
    from dspark.cli.machine import machine, versions
    from dspark.cli.terminal import write_json

    facts = {
        "versions": versions(),
        "machine": machine(),
        "models": _models(),
        "drafters": _drafters(),
        "cache_directory": str(cache_directory()),
    }
    if args.json:
        write_json(facts, indent=1)
    else:
        _print(facts)
    return 0


def _models() -> list[dict[str, Any]]:
    from dspark.target.zoo import known_models

    return [
        {
            "name": model.name,
            "description": model.description,
            "installed": model.installed,
            "path": None if model.path is None else str(model.path),
            "install_command": model.install_command,
        }
        for model in known_models().values()
    ]


def _drafters() -> list[dict[str, Any]]:
    from dspark.drafters.checkpoint import read_drafter_config
    from dspark.drafters.registry import shipped_drafters

    found = []
    for name, path in shipped_drafters().items():
        config = read_drafter_config(path)
        found.append(
            {"name": name, "method": config.method, "block_size": config.block_size, "path": str(path)}
        )
    return found


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from dspark.cli.terminal import Output

    machine = facts["machine"]
    accelerators = [*machine["cuda"], *(["MPS"] if machine["mps"] else [])]
    memory = "memory unknown" if machine["memory_gb"] is None else f"{machine['memory_gb']} GB"
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut is of no use
    for name, version in facts["versions"].items():
        table.add_row(name, version or "not installed")
    table.add_row("machine", f"{machine['cpu']}, {machine['system']}")
    table.add_row("", f"{machine['cores']} cores, {machine['threads']} threads in use, {memory}")
    table.add_row("accelerators", ", ".join(accelerators) or "none")
    for model in facts["models"]:
        where = model["path"] or f"not installed; run: {model['install_command']}"
        table.add_row("model", f"{model['name']}: {model['description']}\n{where}")
    for drafter in facts["drafters"]:
        table.add_row(
            "drafter",
            f"{drafter['name']}: {drafter['method']}, {drafter['block_size']} drafts\n{drafter['path']}",
        )
    if not facts["drafters"]:
        table.add_row("drafter", "none shipped")
    table.add_row("cache", facts["cache_directory"])
    Output().print(table)
