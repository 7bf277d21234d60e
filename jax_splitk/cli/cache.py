"""`cache`: the arguments of its commands."""

import argparse
from typing import Any

from jax_splitk.cli import cache_combine, cache_look, cache_prune
from jax_splitk.cli.usage import not_negative


def add_parser(commands: Any) -> None:
    cache = commands.add_parser("cache", help="list, check, compare, combine and clean what tuning decided")
    parsers = cache.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        parser = parsers.add_parser(name, help=about, description=about)
        parser.add_argument("--json", action="store_true", help="machine-readable output")
        parser.set_defaults(run=run, parser=parser)
        return parser

    ls = add("ls", cache_look.list_entries, "the decisions in all layers of the cache")
    ls.add_argument("--layer", type=int, metavar="N", help="only this layer; 0 is the writable one")
    show = add("show", cache_look.show_entry, "one decision with all its measurements")
    show.add_argument("what", metavar="DIGEST_PREFIX_OR_FILE")
    verify = add("verify", cache_look.verify_files, "read every file; exit code 1 if one cannot be used")
    verify.add_argument("folder", nargs="?", metavar="DIR", help="a cache folder; all layers by default")
    diff = add("diff", cache_look.diff_folders, "what one cache folder has and another has not, or decides otherwise")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    merge = add(
        "merge", cache_combine.merge_folders, "put the entries of cache folders into another; newer decisions win"
    )
    merge.add_argument("sources", nargs="+", metavar="SRC")
    merge.add_argument("destination", metavar="DST", help="a cache folder, made if need be")
    export = add(
        "export", cache_combine.export_entries, "write the writable layer's entries into one file, a TuningResult"
    )
    export.add_argument("file", metavar="FILE")
    import_ = add("import", cache_combine.import_entries, "put an exported file's entries into the writable layer")
    import_.add_argument("file", metavar="FILE")
    prune_ = add(
        "prune", cache_prune.prune_entries, "delete entries and machine code of the writable layer, and list them"
    )
    prune_.add_argument("--environment", choices=("other", "all"), help="what other machines or versions made, or all")
    prune_.add_argument(
        "--older-than", type=not_negative, metavar="DAYS", help="only what was measured or compiled longer ago"
    )
    prune_.add_argument("--damaged", action="store_true", help="also files that no version of jax_splitk can use")
    prune_.add_argument("--dry-run", action="store_true", help="list, but do not delete")
