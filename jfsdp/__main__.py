"""The `jfsdp` command: finds the sub-command's module and imports nothing else."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "plan": ("jfsdp.planning.command:command", "memory, traffic and time of a run before it runs"),
    "audit": ("jfsdp.audit.report:command", "compare two programs that plan --compile or train.py --audit wrote"),
    "inspect": ("jfsdp.contents:inspect_command", "what a checkpoint holds"),
    "export": ("jfsdp.convert:export_command", "a checkpoint to a Hugging Face folder"),
    "import": ("jfsdp.convert:import_command", "a Hugging Face folder to a checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command and give its exit code; 2 for a name that is not known."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jfsdp COMMAND [options]\n\n" + _listed() + "\n\njfsdp COMMAND --help tells more.")
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"jfsdp: error: command {name!r} is unknown. Known are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # none of these computes: leave GPUs to those who do
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(rest) or 0


def _listed() -> str:
    return "\n".join(f"  {name:8} {words}" for name, (_, words) in COMMANDS.items())


if __name__ == "__main__":
    sys.exit(main())
