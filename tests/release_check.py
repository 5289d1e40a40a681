"""Checks that a release can be tagged: `python tests/release_check.py TWINE`, with twine's path.

The version is the same everywhere and CHANGELOG.md has it. The source distribution and the wheel
build from a clean copy of the last commit, their metadata is well formed, and `effuse demo` runs
from the installed wheel. The dependencies are those of the running interpreter, because they take
6 GB. It writes `dist/` and tags nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
MOST_LINES: Final = 150  # of one release in CHANGELOG.md
IMAGE: Final = re.compile(r"localhost/effuse-[a-z-]+:([\w.]+)")
CHART: Final = re.compile(r'^(?:version|appVersion): "?([^"\n]+)"?$', re.MULTILINE)
HEADING: Final = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)
DAY: Final = re.compile(r"20\d\d-[01]\d-[0-3]\d")
DEMO_S: Final = 600.0


def main(argv: list[str]) -> int:
    """Runs all checks; 1 if one fails."""
    version = project_version(ROOT)
    found = faults(ROOT, version)
    if not found:
        try:
            built = build(ROOT / "dist")
            run(argv[0], "check", "--strict", *map(str, built))
            try_wheel(next(one for one in built if one.suffix == ".whl"))
        except subprocess.CalledProcessError as error:
            found = [f"{' '.join(map(str, error.cmd))} failed with status {error.returncode}"]
    for fault in found:
        print(f"release-check: {fault}", file=sys.stderr)
    if not found:
        print(f"release-check: git tag --annotate v{version} --message 'effuse {version}'")
    return int(bool(found))


def project_version(root: Path) -> str:
    """The version in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


def faults(root: Path, version: str) -> list[str]:
    """A line for each place that does not fit the version."""
    found = []
    for path in sorted((root / "k8s").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            pattern = CHART if path.name == "Chart.yaml" else IMAGE
            others = sorted(set(pattern.findall(text)) - {version})
            found += [f"{path.relative_to(root)}: has {one}, not {version}" for one in others]
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = HEADING.search(text)
    if heading is None or heading[1] != version or not DAY.fullmatch(heading[2]):
        found.append(f"CHANGELOG.md: the first heading is not '## {version} (YYYY-MM-DD)'")
        return found
    lines = text[heading.end() :].split("\n## ")[0].count("\n")
    if lines > MOST_LINES:
        found.append(f"CHANGELOG.md: {lines} lines about {version}, at most {MOST_LINES}")
    return found


def build(folder: Path) -> list[Path]:
    """The source distribution of the last commit and the wheel made of it, in an empty folder."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as copy:
        run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", copy)
        run(sys.executable, "-P", "-m", "build", "--outdir", str(folder), copy)
    return sorted(folder.iterdir())


def try_wheel(wheel: Path) -> None:
    """Installs the wheel into an environment of its own and runs `effuse demo` there."""
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=True)
        python = Path(home) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
        own = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        # Behind its own packages, so that effuse is the wheel's.
        (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        run(
            python,
            "-P",
            "-c",
            f"import effuse; assert effuse.__file__.startswith({own!r})",
            cwd=home,
        )
        run(Path(home) / "bin" / "effuse", "demo", cwd=home)


def run(*command: str | Path, cwd: str | None = None) -> None:
    """Raises CalledProcessError or TimeoutExpired."""
    print("release-check:", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=cwd, check=True, timeout=DEMO_S, env=clean)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
