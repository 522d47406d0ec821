"""Rate limits by key: a burst, a steady rate, and a bound on the keys."""

from nvpool.core.clock import ManualClock
from nvpool.core.containers import rate_limits
from nvpool.core.containers.rate_limits import RateLimits


def test_key_may_take_a_burst_then_a_steady_rate():
    clock = ManualClock()
    limits = RateLimits(3, 0.5, clock)
    assert [limits.take("a") for _ in range(4)] == [True, True, True, False]
    assert limits.take("b"), "each key for itself"
    clock.advance(1.0)
    assert not limits.take("a")
    clock.advance(1.0)
    assert [limits.take("a") for _ in range(2)] == [True, False]
    clock.advance(1000.0)
    assert [limits.take("a") for _ in range(4)] == [True, True, True, False]


def test_keys_beyond_the_bound_share_one_limit(monkeypatch):
    monkeypatch.setattr(rate_limits, "KEYS_MAX", 4)
    clock = ManualClock()
    limits = RateLimits(2, 1.0, clock)
    assert all(limits.take(key) for key in "abcd")
    assert [limits.take(key) for key in "efghi"] == [True, True, False, False, False]
    assert limits.take("a"), "a known key keeps its own"
    clock.advance(10.0)
    assert all(limits.take(key) for key in "efg")
