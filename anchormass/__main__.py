"""The command line: `python -m anchormass COMMAND`.

Only the chosen command's module is imported, so help is quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

from anchormass import __version__
from anchormass.errors import AnchorMassError

# command: module with `add_parser(subparsers)`, and one line of help
COMMANDS = {
    "data": ("anchormass.corpus", "fetch and build training text"),
    "train": ("anchormass.train", "train a model"),
    "reproduce": ("anchormass.study", "run the notebooks, write figures and gallery"),
}


def parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the options of the command that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m anchormass",
        description="AnchorMass Attention: a transformer whose KV cache stays at a fixed size.",
        epilog="examples:\n"
        "  python -m anchormass reproduce                     the whole study, in minutes\n"
        "  python -m anchormass reproduce --only 02 -p layer=3\n"
        "  python -m anchormass data build                    training text, from Debian packages\n"
        "  python -m anchormass train --model anchormass\n"
        "COMMAND --help says more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anchormass {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for command, (module, line) in COMMANDS.items():
        if command == chosen:
            importlib.import_module(module).add_parser(subparsers)
            own = subparsers.choices[command]
            own.add_argument(
                "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        else:
            subparsers.add_parser(command, help=line)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 when part of the work failed; 2 for a wrong request; 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = None
    try:
        args = parser_for(arguments).parse_args(arguments)
        return args.run(args) or 0
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return 130
    except (AnchorMassError, OSError) as error:
        if args is not None and args.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
