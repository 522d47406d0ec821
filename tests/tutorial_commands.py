"""Commands and examples of the tutorials, as tests run them."""

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial"
PROMPT = re.compile(r"(\w*)([$#]) +(.+?)(?: {2,}# .*)?")
"""Host, "#" for root, and command, in a line of a block `console`; a comment may follow."""
DRIVE_SIZE = "256M"


class Command(NamedTuple):
    """One command of a page; `host` is empty where the page has one machine."""

    host: str
    is_root: bool
    text: str


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (TUTORIAL / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page):
    """All commands of the page's blocks `console`, in order. A line without a prompt would not be run, so it fails."""
    found = []
    for line in "".join(blocks(page, "console")).splitlines():
        match = PROMPT.fullmatch(line)
        assert match, f"{page}: no prompt in {line!r}"
        found.append(Command(match[1], match[2] == "#", match[3]))
    return found


def placed(text, place):
    """The command with its paths moved below `place`, and with small drives."""
    text = re.sub(r"(?<!\S)/(srv|mnt|dev)/", rf"{place}/\1/", text)
    text = re.sub(r"(?<!\S)~/", f"{place}/home/", text)
    return re.sub(r"(--drive \S+)", rf"\1:{DRIVE_SIZE}", text)


def environment():
    """The environment of a shell in which the installed commands are found."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
