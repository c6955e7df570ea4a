"""A module that is needed for one function alone is imported when the function is called, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from loopwright.runs.deferred_import import deferred_import

with deferred_import("xml.dom.minidom", "parseString"):
    from xml.dom.minidom import parseString
    {inside}
assert ("xml.dom.minidom" in sys.modules) is {is_imported}
assert parseString("<a>1</a>").documentElement.tagName == "a"
import xml.dom.minidom
assert xml.dom.minidom.Node.ELEMENT_NODE == 1
"""


@pytest.mark.parametrize(
    ("before", "inside", "is_imported"),
    [
        ("", "", False),
        ("", "from xml.dom.minidom import Document", True),
        ("", "parseString('<a/>')", True),
        ("import xml.dom.minidom", "", True),
    ],
    ids=["deferred", "another attribute", "called inside", "imported before"],
)
def test_the_function_works_and_its_module_is_imported_when_needed(before, inside, is_imported):
    script = before + "\n" + SCRIPT.format(inside=inside, is_imported=is_imported)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_detection_losses_of_transformers_still_match():
    script = """
import sys
from loopwright.runs.deferred_import import deferred_import
with deferred_import("scipy.optimize", "linear_sum_assignment"):
    import transformers.modeling_utils
assert "scipy.optimize" not in sys.modules
from transformers.loss import loss_for_object_detection
print(loss_for_object_detection.linear_sum_assignment([[3, 1], [1, 3]])[1].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[1, 0]"
