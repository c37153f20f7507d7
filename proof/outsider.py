"""A client without a key, or with another tenant's, gets nothing out of a server.

Each attempt is a test of `make test`; this runs them alone and writes down how many there were.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from proof.command import ROOT, make_parser
from proof.evidence import Bar, Evidence, record

TESTS = (
    *("tests/e2e/test_outsider.py", "tests/failure_modes/test_bad_input_access.py"),
    "tests/failure_modes/test_bad_input_http.py",
)
LIMIT_S = 600
MENDED = (
    "A Host header with text after an address in brackets was accepted (`test_a_foreign_host`).",
    "Variables of a chat template named `messages` or `self` were a server error "
    "(`test_a_request_brings_no_template_of_its_own`).",
)


def main(arguments: Sequence[str]) -> int:
    make_parser(__name__, __doc__).parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n0", *TESTS, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case.get("name", "") for case in cases if len(case)]
    kinds = {case.get("name", "").partition("[")[0] for case in cases}
    return record(
        Evidence(
            name="outsider",
            order=75,
            title="An outsider",
            about=(
                "No key, wrong keys, another tenant's ids, foreign Host and Origin headers, tricks in paths, "
                "model references and saved slots, oversized and slow bodies, template and grammar bombs, "
                "requests through hub addresses: each attempt is a test over HTTP."
            ),
            bars=[Bar("attempts that got something", "0", ", ".join(bad) or "0", not bad)],
            figures={"attempts": len(cases), "kinds": len(kinds), "seconds": time.monotonic() - began},
            mended=MENDED,
        )
    )
