"""Random programs, 20,000 where `make test` has 100: half an hour."""

import pytest

from mods.test_programs import check_programs


@pytest.mark.parametrize("part", range(100))
def test_changed_programs(part):
    check_programs(range(200 * part, 200 * (part + 1)))
