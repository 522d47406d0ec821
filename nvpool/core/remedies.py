"""Commands in messages: POOL stands in them for the pool's directory or address until it is known.

A message is often made where the pool has no name: in a decision, in another node's daemon. The one who shows it fills in the
name. Called by the CLI and by the status of a pool; a house test keeps the commands whole.
"""

from __future__ import annotations

import re
import shlex

_PLACE = re.compile(r"(\bnvpool [a-z][^`;,()\n]*? )POOL(?=[\s:`;,.)]|$)")
"""Within one command; a pool that is another one is named otherwise there, as in NEW_POOL."""


def with_pool(text: str, pool: str) -> str:
    """`text` with `pool` in its commands, so that they can be copied; unchanged where the pool is not known ("")."""
    if not pool or "POOL" not in text:
        return text
    name = shlex.quote(pool)
    return _PLACE.sub(lambda found: found[1] + name, text)
