"""Axes: where ticks are and what they say."""

from __future__ import annotations

from shoal.monitor.report.charts import even_ticks, step_axis, tick_labels, time_axis, value_axis


def test_ticks_are_round_and_labels_tell_them_apart() -> None:
    assert even_ticks(0.13, 2.3, 5) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert step_axis(1, 2000).labels == ["500", "1k", "1.5k", "2k"]
    assert step_axis(1, 3).labels == ["1", "2", "3"]
    assert step_axis(1_000_000, 1_000_004).labels[:2] == ["1,000,000", "1,000,001"]
    assert time_axis(0.0, 100.0).labels == ["0 s", "30 s", "1 min", "90 s"]
    assert time_axis(0.0, 18_000.0).labels == ["0 h", "1 h", "2 h", "3 h", "4 h", "5 h"]
    assert tick_labels([0, 2e-5, 4e-5], 2e-5) == ["0", "2e-05", "4e-05"]
    assert value_axis(0.001, 10).log and not value_axis(-1, 1000).log
    for low, high in [(0.9801, 0.9803), (5.0, 5.0), (0.0, 0.0), (-3e-7, 1e-9), (1e8, 1.00001e8), (1e-250, 1e250)]:
        labels = value_axis(low, high).labels
        assert len(set(labels)) == len(labels) >= 2, labels
