"""What some tests need and not every machine has. With RWS_JOBS_REQUIRE_ALL=1, as in CI, a lack of it is a failure."""

import os
import shutil
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip the test, saying why, or fail it where everything must be there."""
    if os.environ.get("RWS_JOBS_REQUIRE_ALL") == "1":
        pytest.fail(f"{what}, and RWS_JOBS_REQUIRE_ALL=1", pytrace=False)
    pytest.skip(what)


def chromium() -> str:
    """The path of a Chromium: Debian's, or what RWS_JOBS_CHROMIUM says."""
    for name in (os.environ.get("RWS_JOBS_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (path := shutil.which(name)):
            return path
    lacking("no Chromium is installed")
