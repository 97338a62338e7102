"""Build a release into dist/: wheels and source archives built twice, their bill of materials, an audit.

    make release                    AUDIT=strict fails where not every dependency could be audited

Both distributions are built from the files of the commit, twice, in separate folders and with the commit's
time (SOURCE_DATE_EPOCH): all bytes must be the same. The bill of materials (CycloneDX, JSON) describes the
environment that requirements-hashed.txt defines; linters check deploy/. A known vulnerability is a failure; a
service that cannot be reached is a warning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements-hashed.txt"
DISTRIBUTIONS = (".", "reproduce")
SBOM, AUDIT, SUMS = "isthmus.cdx.json", "audit.json", "SHA256SUMS"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command and return its output; if it fails, print its stderr and raise CalledProcessError."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True)
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace"))
    done.check_returncode()
    return done


def build(commit: str, out: Path, python: Path) -> dict[str, str]:
    """Build wheels and source archives of both distributions from a commit. Returns SHA-256 by name."""
    epoch = run("git", "log", "-1", "--format=%ct", commit).stdout.decode().strip()
    with tempfile.TemporaryDirectory(prefix="isthmus-release-") as folder:
        with tarfile.open(fileobj=BytesIO(run("git", "archive", commit).stdout)) as files:
            files.extractall(folder, filter="data")
        for part in DISTRIBUTIONS:
            command = (python, "-I", "-m", "hatchling", "build", "-d", out.resolve())
            run(*command, cwd=Path(folder) / part, SOURCE_DATE_EPOCH=epoch)
    return {path.name: _digest(path) for path in sorted(out.iterdir()) if path.name != ".gitignore"}


def build_twice(commit: str, out: Path, python: Path) -> dict[str, str]:
    """Build twice in separate folders. Returns SHA-256 by name; SystemExit names the files that differ."""
    first = build(commit, out, python)
    with tempfile.TemporaryDirectory(prefix="isthmus-again-") as folder:
        second = build(commit, Path(folder), python)
    differing = sorted({name for name, _ in first.items() ^ second.items()})
    if differing or len(first) != 2 * len(DISTRIBUTIONS):
        raise SystemExit(f"two builds of {commit[:12]} differ: {', '.join(differing) or sorted(first)}")
    return first


def bill_of_materials(out: Path, python: Path, tools: Path, epoch: str) -> int:
    """Write the SBOM, which cyclonedx-py checks against its schema. Returns the number of components."""
    options = ("--short-PURLs", "--output-reproducible", "--validate", "--of", "JSON")
    about = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "library")
    command = (tools / "cyclonedx-py", "environment", *options, *about, "-o", out / SBOM, python)
    run(*command, SOURCE_DATE_EPOCH=epoch)
    return len(json.loads((out / SBOM).read_text(encoding="utf-8"))["components"])


def audit(out: Path, tools: Path) -> tuple[list[str], int, int]:
    """Return known vulnerabilities of pinned packages, and the numbers of packages looked up and pinned."""
    pins = sum("==" in line for line in PINS.read_text(encoding="utf-8").splitlines())
    options = ("--disable-pip", "--progress-spinner=off", "-f", "json")
    command: list[str | Path] = [tools / "pip-audit", "-r", PINS, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:  # pip-audit failed before its audit
        sys.stderr.write("".join(done.stderr.decode(errors="replace").splitlines(keepends=True)[-1:]))
        return [], 0, pins
    (out / AUDIT).write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")
    found = [f"{each['name']} {bug['id']}" for each in packages for bug in each.get("vulns", ())]
    return found, sum("skip_reason" not in each for each in packages), pins


def lint(tools: Path) -> None:
    """Check deploy/ with linters, since no container engine may run here."""
    run(tools / "hadolint", ROOT / "deploy" / "Containerfile")
    schema = ("--builtin-schema", "vendor.compose-spec")
    run(tools / "check-jsonschema", *schema, ROOT / "deploy" / "compose.yaml")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Build, compare, list and audit a release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--python", type=Path, required=True, help="of the environment of the pins")
    parser.add_argument(
        "--tools", type=Path, required=True, help="the folder of linters, cyclonedx-py and pip-audit"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--audit", default="", choices=("", "strict"), help="strict: all must be audited")
    options = parser.parse_args()
    if run("git", "status", "--porcelain", "--untracked-files=no").stdout:
        print("· what is not committed is not in this release", file=sys.stderr)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    commit = run("git", "rev-parse", "HEAD").stdout.decode().strip()
    lint(options.tools)
    built = build_twice(commit, options.out, options.python)
    print(f"· {commit[:12]}: {', '.join(built)}, built twice, the same bytes")
    epoch = run("git", "log", "-1", "--format=%ct", commit).stdout.decode().strip()
    print(f"· {bill_of_materials(options.out, options.python, options.tools, epoch)} components in {SBOM}")
    vulnerable, looked_up, pins = audit(options.out, options.tools)
    print(f"· {looked_up} of {pins} packages looked up, {len(vulnerable)} known vulnerabilities")
    names = [path for path in sorted(options.out.iterdir()) if path.name != ".gitignore"]
    sums = "".join(f"{_digest(path)}  {path.name}\n" for path in names)
    (options.out / SUMS).write_text(sums, encoding="ascii")
    if vulnerable:
        raise SystemExit("known vulnerabilities: " + ", ".join(vulnerable))
    if looked_up < pins:
        problem = (
            f"{pins - looked_up} packages were not audited: the service was not reached, or not with them"
        )
        if options.audit == "strict":
            raise SystemExit(problem)
        print(f"· warning: {problem} (AUDIT=strict fails then)", file=sys.stderr)
    print(f"· {options.out} has it all, with {SUMS}")


if __name__ == "__main__":
    main()
