"""All that is tried under faults, by name."""

from __future__ import annotations

from command_scenarios import COMMAND_SCENARIOS
from file_scenarios import FILE_SCENARIOS
from rank_scenarios import RANK_SCENARIOS
from watch_scenarios import WATCH_SCENARIOS

ALL = (*FILE_SCENARIOS, *COMMAND_SCENARIOS, *WATCH_SCENARIOS, *RANK_SCENARIOS)
SCENARIOS = {scenario.name: scenario for scenario in ALL}
