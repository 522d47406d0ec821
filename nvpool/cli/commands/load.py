"""The command `nvpool load`: load dumped metadata into an empty pool."""

from __future__ import annotations

import click

from nvpool.cli.commands.dump import move_records
from nvpool.cli.output import EXIT_DAMAGED, json_option, pool_argument, print_json, print_table, say


@click.command(epilog="""
The pool has to be empty, with the settings of the one that was dumped; the file is checked as a whole first. Contents are not
in a dump: files are there with their names, sizes and attributes, and read as far as the stores still have their chunks, else
as zeros until they are imported again (nvpool import --compare). Of up to 64 files it is looked whether the stores have
something, and said of how many they do not.

exit codes: 0 loaded, and what contradicted itself in the records is mended; 4 not all of it could be

example: nvpool load /srv/newpool /backup/pool-metadata.dump
""")
@pool_argument
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@json_option
def load(pool: str, path: str, as_json: bool) -> int:
    """Load dumped metadata into an empty pool."""
    from nvpool.sdk.admin.dump import load
    loaded = move_records(pool, path, "load", load, as_json)
    if as_json:
        print_json({"file": path, "records": loaded.records, "problems": [problem._asdict() for problem in loaded.problems],
                    "unrepaired": loaded.left, "contents_in_dump": False, "files_sampled": loaded.files_sampled,
                    "files_without_data": loaded.files_without_data, "unanswered": loaded.unanswered})
    else:
        if loaded.problems:
            print_table(("kind", "where", "what", "repaired"), [problem[:4] for problem in loaded.problems])
        click.echo(f"{loaded.records:,} records: {path}; contents of files are not in a dump, they live on targets")
    if loaded.problems:
        say(f"{len(loaded.problems):,} problems in the records of the dump, "
            + (f"{loaded.left:,} of them left; try: nvpool fsck --repair {pool}" if loaded.left else "all mended"))
    if loaded.files_without_data:
        say(f"{loaded.files_without_data} of {loaded.files_sampled} sampled files have no data here: their contents were not "
            f"in the dump, and they read as zeros; restore them with: nvpool import --compare SRC {pool}:/path")
    if loaded.unanswered:
        say(f"whether all contents are here is not known: {loaded.unanswered}")
    return EXIT_DAMAGED if loaded.left else 0
