"""The commands that prepare data."""

import json
import sys
from typing import Any

import tyro


def run_command(name: str, commands: dict[str, Any], args: list[str] | None = None) -> int:
    """Runs a command, and prints the facts that it returns.

    Args:
      name: what begins an error.
      commands: their dataclasses, by name; each has a `run`.
      args: the command line; that of the process if not given.

    Returns:
      0, or 2 for input that cannot be used.
    """
    command = tyro.extras.subcommand_cli_from_dict(commands, args=args)
    try:
        print(json.dumps(command.run(), indent=2))
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
