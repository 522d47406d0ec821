"""`nvpool scrub start|pause|resume|stop`: texts, exit codes, and a wait that is interrupted."""

import json

import pytest

from nvpool.cli import main as cli_main
from nvpool.cli import pool_connection
from nvpool.cli.commands import scrub

POOL = "node-1:7500"
IDLE = {"began_ms": 0, "blocks": 0, "blocks_total": 8, "bad": 0, "mended": 0, "seconds_left": -1.0} | {
    "state": "idle",
    "next_ms": 0,
    "last_ended_ms": 1,
    "last_bad": 0,
    "last_mended": 0,
}


@pytest.fixture
def ordered(monkeypatch, capfd):
    """Run `nvpool scrub` in a pool that answers an order with (targets, silent); the exit code and the output."""

    def run(targets, silent, *words, **last):
        asked = []

        async def change(pool, verb, arguments, wait_s=180.0):
            asked.append((pool, verb, arguments))
            return {"targets": targets, "silent": silent}

        async def statuses(pool):
            store = {"role": "store", "drive": 1, "node": 1, "path": "/d", "scrub": IDLE | last}
            yield {"processes": [store | {"target": number} for number in targets]}

        monkeypatch.setattr(pool_connection, "change", change)
        monkeypatch.setattr(pool_connection, "statuses", statuses)
        code = cli_main.main(["scrub", *words])
        out, err = capfd.readouterr()
        assert [(pool, verb, one["order"]) for pool, verb, one in asked] == [(POOL, "scrub", words[0])]
        return code, out, err

    return run


TEXTS = [
    ("start", "scrubbing started on"),
    ("pause", "scrubbing is paused on"),
    ("resume", "scrubbing continues on"),
    ("stop", "scrubbing is stopped on"),
]


@pytest.mark.parametrize(("order", "text"), TEXTS)
def test_scrub_order_names_its_targets(ordered, order, text):
    code, out, err = ordered([2, 1], {}, order, POOL)
    assert (code, out) == (0, f"{text} targets 1, 2\n") and f"nvpool scrub status {POOL}" in err
    assert ordered([3], {}, order, POOL, "--target", "3")[:2] == (0, f"{text} target 3\n")


@pytest.mark.parametrize(("order", "text"), TEXTS)
def test_scrub_order_that_a_target_missed_ends_with_3(ordered, order, text):
    code, out, err = ordered([1], {"2": "no reply"}, order, POOL)
    assert (code, out) == (3, f"{text} target 1\n")
    assert "target 2 did not receive the command: no reply" in err and f"nvpool status {POOL}" in err
    code, out, _ = ordered([], {"2": "no reply"}, order, POOL)
    assert (code, out) == (3, "no target received the command\n")
    code, out, _ = ordered([], {"2": "no reply"}, order, POOL, "--json")
    assert code == 3 and json.loads(out) == {"targets": [], "silent": {"2": "no reply"}}


def test_scrub_wait_ends_with_3_if_no_target_got_the_order(ordered):
    code, out, err = ordered([], {"1": "no reply"}, "start", POOL, "--wait")
    assert (code, out) == (3, "no target received the command\n") and "target 1 did not receive" in err
    code, out, _ = ordered([], {"1": "no reply"}, "start", POOL, "--wait", "--json")
    assert code == 3 and json.loads(out)["scrub"] == []


def test_scrub_wait_reports_the_targets_that_have_it(ordered):
    assert ordered([1], {}, "start", POOL, "--wait")[0] == 0
    code, out, _ = ordered([1], {"2": "no reply"}, "start", POOL, "--wait", "--json")
    assert code == 3 and [one["target"] for one in json.loads(out)["scrub"]] == [1]
    assert ordered([1], {}, "start", POOL, "--wait", last_bad=2, last_mended=1)[0] == 4


@pytest.mark.parametrize(("words", "stop"), [((), ""), (("--drive", "2"), " --drive 2")])
def test_interrupted_scrub_wait_says_that_the_scrub_goes_on(ordered, monkeypatch, words, stop):
    async def interrupted(pool, targets, quiet):
        raise KeyboardInterrupt

    monkeypatch.setattr(scrub, "wait_for_scrub", interrupted)
    code, _, err = ordered([1], {}, "start", POOL, "--wait", *words)
    assert code == 130
    look, end = f"nvpool scrub status {POOL}", f"nvpool scrub stop {POOL}{stop}"
    assert f"scrubbing goes on; look with: {look}; end it with: {end}\n" in err
