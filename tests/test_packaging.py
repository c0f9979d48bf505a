"""What a built package contains."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.repository import REPO

PACKAGES = ("flows", "infra", "tasks", "training")


def test_a_wheel_contains_every_module_and_page_and_images_every_page(tmp_path: Path) -> None:
    modules = {str(path.relative_to(REPO)) for package in PACKAGES for path in (REPO / package).rglob("*.py")}
    pages = {str(path.relative_to(REPO)) for package in PACKAGES for path in (REPO / package).rglob("*.html*")}
    assert {"tasks/serving/demo_page.html", "tasks/reports/run_report.html.j2"} <= pages
    source = tmp_path / "source"
    copied = ["pyproject.toml", "README.md", *PACKAGES]
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(REPO / name) for name in copied), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert modules | pages <= set(zipfile.ZipFile(wheel).namelist())
    for image in ("head", "serve"):
        allowed = (REPO / "infra" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
        assert "!tasks/**/*.html*" in allowed, "Docker copies a page only if the image's ignore file allows it"
    assert {page.split("/")[0] for page in pages} == {"tasks"}
