"""The documentation runs: the blocks of each recipe in a process of their own, README's example, the map
names every room."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "custom-kernels.md",
    ROOT / "docs" / "transforms.md",
    *sorted((ROOT / "docs").glob("add-*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, "the page shows no code"
    program = "\n".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_map_names_every_room_and_file() -> None:
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    rooms = [p.parent.name for p in (ROOT / "whit").glob("*/__init__.py")]
    missing = [room for room in rooms if f"whit/{room}" not in text]
    assert not missing, f"docs/map.md has no paragraph on {missing}"


def test_settings_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "whit.uop", "settings"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), "run `make docs`"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
