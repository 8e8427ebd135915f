"""The table of faults keeps up with the code; planting them takes minutes and is scripts/mutate's work."""

from __future__ import annotations

import pytest

from tests.faults import FAULTS
from tests.helpers import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1 and fault.old != fault.new
    compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_there_are_enough_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
