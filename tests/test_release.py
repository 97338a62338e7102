"""What a release is made of: builds, pins, units of systemd, containers, and the commands of the runbook."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from isthmus.cli import main
from isthmus.cli.program import parser
from isthmus.service.settings import read_broker, read_node

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SILOS = ("north", "south", "west")


def tool(name):
    """A program on the path, or of the environment of `make release`; without it the test is skipped."""
    beside = Path(sysconfig.get_path("scripts")).parent / "release-tools" / "bin"
    path = shutil.which(name) or shutil.which(name, path=str(beside))
    if path is None:
        pytest.skip(f"{name} is not here: make release installs it, or the system's package")
    return path


def ran(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    return done.returncode, done.stdout + done.stderr


def pins(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [
        line.partition(" ;")[0].removesuffix("\\").strip() for line in lines if re.match(r"[\w.-]+==", line)
    ]


def test_every_pin_of_the_core_has_its_hashes_and_no_file_names_a_host():
    text = (ROOT / "requirements-hashed.txt").read_text(encoding="utf-8")
    assert pins("requirements-hashed.txt") == pins("requirements.txt"), ".ci/pins hashes writes it again"
    blocks = re.split(r"\n(?=\S)", text.strip())[1:]
    assert all(
        re.fullmatch(r"\S+==\S+( ;[^\\]*)?( \\\n    --hash=sha256:[0-9a-f]{64})+", each) for each in blocks
    )
    for file in ROOT.glob("requirements*.txt"):
        assert not re.search(r"://|--(extra-)?index-url|--find-links|@ ", file.read_text(encoding="utf-8")), (
            file
        )


def test_two_builds_of_a_commit_are_the_same_bytes(tmp_path):
    if ran("git", "-C", str(ROOT), "rev-parse", "HEAD")[0]:
        pytest.skip("this is no git repository, and a release is made of a commit")
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    (tmp_path / "dist").mkdir()
    built = release.build_twice("HEAD", tmp_path / "dist", Path(sys.executable))
    assert {re.sub(r"-[\d.a-z]+?(-py3.*)?\.(whl|tar\.gz)$", r" \2", name) for name in built} == {
        f"{name} {kind}" for name in ("isthmus", "isthmus_reproduce") for kind in ("whl", "tar.gz")
    }


# systemd


def unit(path):
    read = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    read.optionxform = str
    read.read_string(path.read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_drops_all_rights_that_the_service_does_not_need(path):
    service = unit(path)["Service"]
    yes = (
        *("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"),
        *("RestrictSUIDSGID", "MemoryDenyWriteExecute", "LockPersonality", "ProtectKernelModules"),
    )
    assert {name: service[name] for name in yes} == dict.fromkeys(yes, "yes")
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert (service["User"], service["UMask"], service["StateDirectoryMode"]) == ("isthmus", "0077", "0700")
    assert service["ExecStart"].startswith("/opt/isthmus/bin/isthmus ")
    parser().parse_args(shlex.split(service["ExecStart"])[1:])


def test_systemd_accepts_the_units(tmp_path):
    analyze = tool("systemd-analyze")
    for path in UNITS:
        text = path.read_text(encoding="utf-8").replace(
            "/opt/isthmus/bin/isthmus ", f"{shutil.which('true')} "
        )
        (tmp_path / path.name).write_text(text)
    copies = [str(tmp_path / path.name) for path in UNITS]
    status, output = ran(analyze, "verify", *copies)
    remarks = [
        line for line in output.splitlines() if "isthmus" in line
    ]  # others are of this machine's units
    assert not remarks
    if status:
        pytest.skip(f"systemd-analyze cannot work here: {output[:200]}")
    for copy in copies:
        status, output = ran(analyze, "security", "--offline=true", "--threshold=20", copy)
        if "unrecognized option" in output:
            pytest.skip("systemd-analyze is older than 250")
        assert status == 0, output[-300:]  # an exposure of 2.0 at most, of 10


# containers


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def test_the_container_is_nobody_and_its_packages_are_pinned_by_hash():
    lines = (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FROM")} == {"python:3.11-slim"}
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    text = "\n".join(lines)
    assert "--require-hashes -r requirements-hashed.txt" in text
    copied = [
        word
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert all((ROOT / name).exists() for name in copied)
    assert not re.search(r"https?://|--index-url|ADD ", text)


def test_hadolint_finds_nothing():
    assert ran(tool("hadolint"), str(DEPLOY / "Containerfile")) == (0, "")


def test_the_compose_file_is_of_its_schema():
    command = (
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        str(DEPLOY / "compose.yaml"),
    )
    status, output = ran(*command)
    assert status == 0, output


def test_each_service_has_its_own_folder_and_only_the_broker_a_port(compose):
    services = compose["services"]
    assert set(services) == {*SILOS, "broker"}
    for name, service in services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "10001:10001" in service["user"]
        assert service["healthcheck"]["test"][0] == "CMD"
        assert all(f"/{name}" in volume for volume in service["volumes"])
        assert not service.get("privileged")
    assert [name for name in services if "ports" in services[name]] == ["broker"]
    assert all(port.startswith("127.0.0.1:") for port in services["broker"]["ports"])
    assert compose["networks"]["silos"]["internal"]
    assert all(services[name]["networks"] == ["silos"] for name in SILOS)


def test_the_settings_of_the_compose_file_are_those_of_a_new_federation(compose, tmp_path):
    folder = tmp_path / "federation"
    assert main(["new", str(folder), "--silos", ",".join(SILOS)]) == 0
    for name, service in compose["services"].items():
        parsed = parser().parse_args(service["command"])
        config = folder / (parsed.config if name == "broker" else f"{name}/{parsed.config}")
        read = (read_broker if name == "broker" else read_node)(config, parsed.changes)
        assert (read.host, read.port) == ("0.0.0.0", 8100 if name == "broker" else 8101)
        if name == "broker":
            assert {silo: each.url for silo, each in read.silos.items()} == {
                silo: f"https://{silo}:8101" for silo in SILOS
            }
            assert read.folder == folder / "broker"
        else:
            assert read.folder.is_relative_to(folder / name)


# the runbook


@pytest.mark.parametrize("page", ["docs/breach.md", "SECURITY.md"])
def test_every_command_of_the_runbook_exists(page):
    """With these options: each is parsed as it stands, but for words in capitals."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    commands = [line.partition("  #")[0] for line in commands if line.startswith("isthmus ")]
    assert page != "docs/breach.md" or len(commands) > 15
    for line in commands:
        parser().parse_args(shlex.split(line)[1:])
