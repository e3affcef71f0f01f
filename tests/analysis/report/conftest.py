from pathlib import Path

import pytest

from quantdiff.analysis.report import Report, write_report
from tests.analysis.report.sample import sample_report


@pytest.fixture(scope="session")
def report() -> Report:
    return sample_report()


@pytest.fixture(scope="session")
def written(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in a folder whose name means harm."""
    folder = tmp_path_factory.mktemp("report") / "한국어 \"'<b>#%2e"
    write_report(report, folder)
    return folder
