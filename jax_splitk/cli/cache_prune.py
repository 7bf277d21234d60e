"""`cache prune`: deletes, and lists what it deleted."""

import argparse

from jax_splitk.cli import output, prune
from jax_splitk.cli.usage import UsageError, require_writable
from jax_splitk.runtime import disk


def prune_entries(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        require_writable()
    if arguments.environment is None and arguments.older_than is None and not arguments.damaged:
        raise UsageError("nothing to prune was named; accepted: --environment, --older-than, --damaged")
    chosen = prune.selected(
        disk.cache_dir(),
        environment=arguments.environment,
        older_than_days=arguments.older_than,
        damaged=arguments.damaged,
    )
    deleted, failed = [], []
    for path, why in chosen:
        try:
            if not arguments.dry_run:
                path.unlink(missing_ok=True)
            deleted.append({"file": str(path), "why": why})
        except OSError as error:
            failed.append({"file": str(path), "why": str(error)})
    value = {"dry_run": arguments.dry_run, "deleted": deleted, "failed": failed}
    verb = "would delete" if arguments.dry_run else "deleted"
    lines = [output.printable(f"{verb} {item['file']}: {item['why']}") for item in deleted]
    output.emit(value, "\n".join([*lines, f"{verb} {len(deleted)} files"]), as_json=arguments.json)
    for item in failed:
        output.note(f"cannot delete {item['file']}: {item['why']}")
    return 1 if failed else 0
