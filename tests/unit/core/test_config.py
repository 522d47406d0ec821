"""The node configuration is checked as a whole; each error names its line and reason."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core import config
from nvpool.core.errors import BadConfiguration
from nvpool.core.units import MIB


def error_of(text: str) -> str:
    with pytest.raises(BadConfiguration) as caught:
        config.parse(text, "node.toml")
    return str(caught.value)


def test_sample_is_the_default_configuration():
    assert config.parse(config.sample()) == config.Config()


def test_uncommented_sample_is_the_default_configuration():
    lines = [line.removeprefix("# ") if " = " in line else line for line in config.sample().splitlines()]
    assert config.parse("\n".join(lines)) == config.Config()


def test_sample_explains_every_key():
    lines = config.sample().splitlines()
    for name, section in config.as_dict(config.Config()).items():
        assert f"[{name}]" in lines
        for key in section:
            at = next(number for number, line in enumerate(lines) if line.startswith(f"# {key} = "))
            assert lines[at - 1].startswith("# ") and len(lines[at - 1]) > 10, key


def test_empty_file_is_the_default():
    assert config.parse("") == config.Config()


def test_given_values_are_kept_and_written_back():
    given_config = config.parse(
        '[log]\nlevel = "debug"\n[journal]\nmap_bytes_max = "64MiB"\nsync_interval_s = 1\n'
    )
    assert given_config.log.level == "debug"
    assert given_config.journal.map_bytes_max == 64 * MIB
    assert given_config.journal.sync_interval_s == 1.0
    assert config.parse(config.sample(given_config)) == given_config


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("[log]\nlevl = 'info'", 2, "log.levl is unknown; did you mean level?"),
        ("\n\n[jurnal]\n", 3, "jurnal is unknown; did you mean journal?"),
        ("level = 'info'", 1, "level is unknown"),
        ("log = 3", 1, "log is a section: write it as [log]"),
        ("[log]\nlevel = 'loud'", 2, 'log.level = "loud"'),
        ("[meta]\n# so\nsession_lease_s = -1", 3, "meta.session_lease_s = -1"),
        ("[meta]\ngrant_s = nan", 2, "is not a number"),
        ("[meta]\ngrant_s = inf", 2, "meta.grant_s = inf"),
        ("[journal]\nlayer_entries_max = 1.5", 2, "layer_entries_max = 1.5"),
        ("[journal]\nmap_bytes_max = '1X'", 2, "is not a size"),
        ("[journal]\nmap_bytes_max = '1K'", 2, 'write a size like "64MiB" from 16MiB to 64TiB'),
        ("[store]\ndirect = 1", 2, "store.direct = 1"),
        ("[network]\nhost = 1", 2, "network.host = 1"),
        ("[network]\nbase_port = true", 2, "base_port = true: write a whole number from 0 to 65,000"),
        ("[supervisor]\nrestart_delay_min_s = 9", 2, "is longer than restart_delay_max_s"),
        ("[meta]\ngrant_s = 10", 2, "is shorter than session_lease_s"),
        ("supervisor.drain_s = 'long'", 1, 'supervisor.drain_s = "long": write a number from 0 to 3600'),
    ],
)
def test_error_names_line_and_reason(text, line, reason):
    said = error_of(text)
    assert f"line {line}: " in said and reason in said, said


def test_all_errors_are_reported_together():
    said = error_of("[log]\nlevel = 1\nto = 2\n[store]\nspeed = 'high'\n[meta]\ngrant_s = 1\n")
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        "line 2",
        "line 3",
        "line 5",
        "line 7",
    ]


def test_text_that_is_not_toml_is_refused_with_its_line():
    assert "line 2" in error_of("[log]\nlevel = \n")


@pytest.mark.parametrize(
    "content, reason",
    [(None, "does not exist"), (b"\xff\xfe", "not UTF-8"), ("directory", "cannot be read")],
)
def test_unreadable_file_is_refused(tmp_path, content, reason):
    place = tmp_path / "node.toml"
    if content == "directory":
        place.mkdir()
    elif content is not None:
        place.write_bytes(content)
    with pytest.raises(BadConfiguration, match=reason):
        config.load(place)


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=200)
    | st.dictionaries(
        st.sampled_from(["log", "meta", "store", "journal", "x"]),
        st.dictionaries(
            st.sampled_from(["level", "grant_s", "direct", "y"]),
            st.integers()
            | st.text(max_size=5)
            | st.booleans()
            | st.floats(allow_nan=False, allow_infinity=False),
        ),
    ).map(
        lambda tables: "\n".join(
            [
                f"[{name}]\n"
                + "\n".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items())
                for name, table in tables.items()
            ]
        )
    )
)
def test_any_text_is_a_configuration_or_refused(text):
    try:
        assert isinstance(config.parse(text), config.Config)
    except BadConfiguration:
        pass


@pytest.mark.parametrize(
    "text",
    [
        'networks = "10.0.0.0/33"',
        'networks = "office"',
        'transports = "tcp,self"',
        'transports = "A B"',
        'devices = "mlx5_0;rm"',
        "poll_us = 2000",
        'enabled = "on"',
    ],
)
def test_invalid_rdma_settings_are_refused(text):
    with pytest.raises(BadConfiguration, match="rdma"):
        config.parse(f"[rdma]\n{text}\n")
    good = config.parse(
        '[rdma]\nnetworks = "10.0.0.0/16, fd00::/8"\ndevices = "mlx5_0:1,mlx5_1:1"\ntransports = "rc,self"\n'
    )
    assert len(config.networks_of(good.rdma.networks)) == 2
