"""Pool names in the commands that messages suggest: replaces the placeholder POOL.

The code that creates a message often does not know the pool's directory or address: a decision, or a daemon
of another node. The program that displays the message inserts the name: the CLI or the pool status. A house
test checks that the commands are complete.
"""

from __future__ import annotations

import re
import shlex

_PLACE = re.compile(r"(\bnvpool [a-z][^`;,()\n]*? )POOL(?=[\s:`;,.)]|$)")
"""Matches POOL within one command; a command that means another pool uses another word, such as NEW_POOL."""


def with_pool(text: str, pool: str) -> str:
    """Return `text` with `pool` inserted into its commands, so that users can copy them; "" leaves `text`
    unchanged."""
    if not pool or "POOL" not in text:
        return text
    name = shlex.quote(pool)
    return _PLACE.sub(lambda found: found[1] + name, text)
