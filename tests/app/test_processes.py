"""Calls in processes of their own."""

from __future__ import annotations

import os

import pytest

from sinkscope.app.processes import Processes


def test_a_worker_that_is_killed_each_time_takes_no_other_with_it():
    with Processes(2) as pool:
        killed, other = pool.submit(os._exit, 9), pool.submit(sum, (1, 2))
        assert other.result() == 3
        with pytest.raises(RuntimeError, match="its process ended 2 times before it had a result"):
            killed.result()
