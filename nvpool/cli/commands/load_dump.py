"""The command `nvpool load`: load dumped metadata into an empty pool."""

from __future__ import annotations

import click

from nvpool.cli.commands.dump import move_records
from nvpool.cli.output import EXIT_DAMAGED, json_option, pool_argument, print_json, print_table, say


@click.command(
    epilog="""
The pool must be empty and have the settings of the pool that was dumped. The whole file is checked first. A dump contains no
file contents: files get their names, sizes and attributes. Their data can be read if the stores still have the chunks;
otherwise it reads as zeros until you import it again (nvpool import --compare). The command checks up to 64 files for data in
the stores, and prints how many have none.

exit codes: 0 loaded, and contradictions in the records are repaired; 4 some contradictions remain

example: nvpool load /srv/newpool /backup/pool-metadata.dump
"""
)
@pool_argument
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@json_option
def load(pool: str, path: str, as_json: bool) -> int:
    """Load dumped metadata into an empty pool."""
    from nvpool.sdk.dump import load

    loaded = move_records(pool, path, "load", load, as_json)
    if as_json:
        print_json(
            {
                "file": path,
                "records": loaded.records,
                "problems": [problem._asdict() for problem in loaded.problems],
                "unrepaired": loaded.left,
                "contents_in_dump": False,
                "files_sampled": loaded.files_sampled,
                "files_without_data": loaded.files_without_data,
                "unanswered": loaded.unanswered,
            }
        )
    else:
        if loaded.problems:
            print_table(("kind", "where", "what", "repaired"), [problem[:4] for problem in loaded.problems])
        click.echo(
            f"{loaded.records:,} records: {path}; contents of files are not in a dump, they live on targets"
        )
    if loaded.problems:
        say(
            f"{len(loaded.problems):,} problems in the records of the dump, "
            + (
                f"{loaded.left:,} of them left; try: nvpool fsck --repair {pool}"
                if loaded.left
                else "all mended"
            )
        )
    if loaded.files_without_data:
        say(
            f"{loaded.files_without_data} of {loaded.files_sampled} sampled files have no data here: their contents were not "
            f"in the dump, and they read as zeros; restore them with: nvpool import --compare SRC {pool}:/path"
        )
    if loaded.unanswered:
        say(f"whether all contents are here is not known: {loaded.unanswered}")
    return EXIT_DAMAGED if loaded.left else 0
